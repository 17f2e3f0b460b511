"""What tells one text family from another: names and constants, no code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A text family as data.

    ``hf_architectures`` are names in config.json, ``gguf_architectures`` values of ``general.architecture``.
    ``qkv_bias`` says that the query, key and value projections always carry biases; a family without it may still
    have them by ``attention_bias``.  ``gguf_permutes_qk`` says that GGUF files hold query and key rows in
    interleaved order.  The defaults stand in for keys that config.json leaves out.
    """

    name: str
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    default_max_positions: int
    default_head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_permutes_qk: bool = False
