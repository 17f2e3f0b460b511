"""Rotary scaling settings: one spelling for what files write in several, and the context length they imply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mstar.model.config import read_flag, read_float, read_int
from mstar.utils.errors import LoadError

REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
ORIGINAL = "original_max_position_embeddings"
YARN_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def parse_rope_scaling(raw: Mapping[str, Any] | None, max_positions: int, file: str) -> dict[str, Any] | None:
    """Rotary scaling in one form: ``rope_type`` and the numbers of that type.

    Both spellings of the type (``rope_type``, ``type``) are read.  ``original_max_position_embeddings`` is filled in
    with ``max_positions`` where the type needs it and the file leaves it out; dynamic scaling always counts from
    there, as transformers has it.

    Returns:
        None for plain rotary positions.

    Raises:
        LoadError: unknown type, or a missing or malformed number; names the file and the key.
    """
    if raw is None:
        return None
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind in (None, "default"):
        return None
    if not isinstance(kind, str) or kind not in REQUIRED:
        raise LoadError(f"{file}: rope_type {kind!r} is unknown; known: default, {', '.join(REQUIRED)}")
    scaling: dict[str, Any] = {"rope_type": kind}
    scaling |= {key: read_float(raw, key, file) for key in REQUIRED[kind]}
    if kind == "dynamic":
        scaling[ORIGINAL] = max_positions
    elif kind != "linear":
        scaling[ORIGINAL] = read_int(raw, ORIGINAL, file, max_positions)
    if kind == "yarn":
        scaling |= {key: read_float(raw, key, file) for key in YARN_OPTIONAL if raw.get(key)}
        scaling["truncate"] = read_flag(raw, "truncate", file, True)
    return scaling


def context_length(max_positions: int, scaling: Mapping[str, Any] | None) -> int:
    """Longest sequence in tokens.

    Linear and dynamic scaling stretch the trained range by their factor.  Yarn stretches its ORIGINAL range, since
    its files write either number as max_position_embeddings.  Llama 3 files already give the stretched range.
    """
    if scaling is None or scaling["rope_type"] == "llama3":
        return max_positions
    base = max_positions
    if scaling["rope_type"] == "yarn":
        base = scaling[ORIGINAL]
    return int(base * scaling["factor"])


def llama3_scaling_of(factors: Sequence[float], theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """The Llama 3 scaling whose frequency divisors a GGUF stores as ``rope_freqs.weight`` [rotary_dim / 2].

    Returns:
        None unless the divisors are those of Llama 3.1 to 3.3 (low 1, high 4, trained length 8192, any factor).
    """
    factor = max(factors, default=1.0)
    if len(factors) != rotary_dim // 2 or not 1 < factor < math.inf:
        return None
    low, high, trained = 1.0, 4.0, 8192
    for i, stored in enumerate(factors):
        turns = trained * theta ** (-2 * i / rotary_dim) / (2 * math.pi)  # of this pair within the trained length
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not abs(stored - expected) <= 1e-3 * expected:
            return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        ORIGINAL: trained,
    }
