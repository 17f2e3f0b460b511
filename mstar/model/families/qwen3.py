"""Qwen3 (dense): query and key heads are normalised before they are rotated."""

from mstar.model.families.base import Family

FAMILY = Family(
    name="qwen3",
    hf_architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    default_max_positions=32768,
    default_sliding_window=4096,
    default_head_dim=128,
    qk_norm=True,
)
