"""What a checkpoint says of a text model, in one form for every file format.  Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar.utils.errors import LoadError


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder-only text model.

    ``rope_scaling`` is None for plain rotary positions, else a mapping as :func:`mstar.model.rope.parse_rope_scaling`
    returns it.  ``max_position_embeddings`` is the number the file gives; ``context_length`` is the longest sequence
    (prompt plus output, in tokens) after the scaling's own rule.  ``vocab_size`` counts the embedding's rows.
    ``tie_word_embeddings`` says that a checkpoint without a head uses the embedding as its head.  ``sliding_window``
    is how many tokens, itself included, a token of any layer attends to; None is all.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    context_length: int
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None

    def check(self, file: str) -> ModelConfig:
        """Returns itself.  LoadError naming ``file`` if the head counts or the rotary width do not fit."""
        if self.num_heads % self.num_kv_heads:
            raise LoadError(
                f"{file}: {self.num_heads} attention heads cannot be shared by {self.num_kv_heads} key/value heads"
            )
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise LoadError(
                f"{file}: rotary dimension {self.rotary_dim} must be even and at most the head's {self.head_dim}"
            )
        return self


def read_int(raw: Mapping[str, Any], key: str, file: str, default: int | None = None) -> int:
    """A positive integer setting; null counts as absent.

    Raises:
        LoadError: it is absent without a default, no integer, or below 1; names the file and the key.
    """
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise LoadError(f"{file}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"{file}: {key} must be a positive integer, got {value!r}")
    return value


def read_float(raw: Mapping[str, Any], key: str, file: str, default: float | None = None) -> float:
    """A positive number; null counts as absent.  LoadError as :func:`read_int`."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise LoadError(f"{file}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise LoadError(f"{file}: {key} must be a positive number, got {value!r}")
    return float(value)


def read_flag(raw: Mapping[str, Any], key: str, file: str, default: bool = False) -> bool:
    """A boolean; null counts as absent.  LoadError as :func:`read_int`."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LoadError(f"{file}: {key} must be true or false, got {value!r}")
    return value


def read_ids(raw: Mapping[str, Any], key: str, file: str) -> frozenset[int]:
    """Token ids given as one integer, a list, or null (none).  LoadError for anything else."""
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise LoadError(f"{file}: {key} must be a token id or a list of them, got {value!r}")
    return frozenset(ids)
