"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from mstar.model.families.base import Family

FAMILY = Family(
    name="qwen2",
    hf_architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    default_max_positions=32768,
    default_sliding_window=4096,
    qkv_bias=True,
)
