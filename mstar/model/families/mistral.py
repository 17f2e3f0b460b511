"""Mistral: Llama with a sliding window.  GGUF files of it call themselves llama."""

from mstar.model.families.base import Family

FAMILY = Family(
    name="mistral",
    hf_architectures=("MistralForCausalLM",),
    gguf_architectures=(),
    default_max_positions=131072,
    default_sliding_window=4096,
    slides_by_default=True,
)
