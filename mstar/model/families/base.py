"""What tells one text family from another: names and constants, no code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A text family as data.

    ``hf_architectures`` are names in config.json, ``gguf_architectures`` values of ``general.architecture``.
    ``qkv_bias`` says that the query, key and value projections always carry biases; a family without it may still
    have them by ``attention_bias``.  ``gguf_permutes_qk`` says that GGUF files hold query and key rows in
    interleaved order.  ``slides_by_default`` says that every layer has a sliding window unless config.json sets it
    to null; other families have one where ``use_sliding_window`` or ``layer_types`` says so.  The defaults stand in
    for keys that config.json leaves out.
    """

    name: str
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    default_max_positions: int
    default_head_dim: int | None = None
    default_sliding_window: int | None = None
    slides_by_default: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_permutes_qk: bool = False
