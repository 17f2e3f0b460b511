"""Llama 2 and 3, SmolLM2 and everything else that calls itself LlamaForCausalLM."""

from mstar.model.families.base import Family

FAMILY = Family(
    name="llama",
    hf_architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    default_max_positions=2048,
    gguf_permutes_qk=True,
)
