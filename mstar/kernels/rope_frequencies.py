"""The rotary embedding's angle per position (Su et al., 2021) under each rule that stretches a model's context."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mstar.utils.errors import shorten

Scaling = Mapping[str, Any]
DYNAMIC = "dynamic"
ORIGINAL = "original_max_position_embeddings"


def scaling_type(scaling: Scaling | None) -> str:
    """The type of a scaling mapping, spelt ``rope_type`` or ``type``; "default" for None.

    Raises:
        ValueError: an unknown type.
    """
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _RULES:
        raise ValueError(f"rope_type must be one of {', '.join(_RULES)}, got {shorten(kind)}")
    return kind


def inverse_frequencies(rotary_dim: int, theta: float, scaling: Scaling | None) -> torch.Tensor:
    """Angle per position of each rotated pair, fp32 [rotary_dim / 2]: ``theta ** (-2 i / rotary_dim)``, scaled.

    Dynamic scaling gives those of the trained range; see :func:`dynamic_bases` for longer rows.

    Args:
        scaling: None, or a mapping with ``rope_type`` (or ``type``) and that type's numbers.

    Raises:
        ValueError: an unknown type, or a number that its type needs is missing or malformed; names it.
    """
    return _RULES[scaling_type(scaling)](rotary_dim, theta, scaling or {})


def attention_factor(scaling: Scaling | None) -> float:
    """What cosine and sine are multiplied with: yarn's temperature (Peng et al., 2023), 1 for every other type."""
    if scaling is None or scaling_type(scaling) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    factor = _number(scaling, "factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _yarn_scale(factor, _number(scaling, "mscale")) / _yarn_scale(factor, _number(scaling, "mscale_all_dim"))
    return _yarn_scale(factor, 1.0)


def dynamic_bases(lengths: np.ndarray, rotary_dim: int, theta: float, scaling: Scaling) -> np.ndarray:
    """The theta that dynamic scaling gives rows of these lengths in tokens [n], fp32 [n].

    Rows within ``original_max_position_embeddings`` keep the model's own.  In fp32 step by step, as transformers
    computes it: at position 30,000 the last bit of a frequency turns an angle by a thousandth.
    """
    factor, trained = _number(scaling, "factor"), _number(scaling, ORIGINAL)
    grown = np.float32(factor) * lengths.astype(np.float32) / np.float32(trained) - np.float32(factor - 1)
    powers = (np.maximum(grown, 1).astype(np.float64) ** (rotary_dim / (rotary_dim - 2))).astype(np.float32)
    own = np.float32(_trained_base(rotary_dim, theta, scaling))
    return np.where(lengths > trained, np.float32(theta) * powers, own)


def frequencies_of(bases: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Unscaled inverse frequencies fp32 [n, rotary_dim / 2] of thetas fp32 [n]."""
    return 1.0 / torch.pow(bases[:, None], _exponents(rotary_dim, bases.device))


def _exponents(rotary_dim: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).float() / rotary_dim


def _default(rotary_dim: int, theta: float, scaling: Scaling) -> torch.Tensor:
    return 1.0 / (theta ** _exponents(rotary_dim))


def _linear(rotary_dim: int, theta: float, scaling: Scaling) -> torch.Tensor:
    return _default(rotary_dim, theta, scaling) / _number(scaling, "factor")


def _dynamic(rotary_dim: int, theta: float, scaling: Scaling) -> torch.Tensor:
    """NTK-aware scaling: a longer row has a larger theta."""
    if rotary_dim <= 2:
        raise ValueError(f"dynamic rope scaling needs a rotary dimension above 2, got {rotary_dim}")
    return _default(rotary_dim, _trained_base(rotary_dim, theta, scaling), scaling)


def _trained_base(rotary_dim: int, theta: float, scaling: Scaling) -> float:
    # theta, but for the rounding that transformers does on the way, at a length of exactly the trained range.
    factor, trained = _number(scaling, "factor"), _number(scaling, ORIGINAL)
    return theta * (factor * trained / trained - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))


def _llama3(rotary_dim: int, theta: float, scaling: Scaling) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor, low, high, trained = (
        _number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
    )
    plain = _default(rotary_dim, theta, scaling)
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > trained / low, plain / factor, plain)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    is_between = ~(wavelength < trained / high) & ~(wavelength > trained / low)
    return torch.where(is_between, blended, stretched)


def _yarn(rotary_dim: int, theta: float, scaling: Scaling) -> torch.Tensor:
    """Yarn: pairs that turn often within the trained range keep their frequency, those that turn less than once are
    stretched by ``factor``, and a ramp over the pairs lies between."""
    factor, trained = _number(scaling, "factor"), _number(scaling, ORIGINAL)

    def pair_that_turns(times: float) -> float:
        return rotary_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(_number(scaling, "beta_fast", 32.0))
    high = pair_that_turns(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    wavelengths = theta ** _exponents(rotary_dim)
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(scaling: Scaling, key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    if not value and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"rope scaling needs {key}, a finite number > 0, got {shorten(value)}")
    return value


_RULES: dict[str, Callable[[int, float, Scaling], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    DYNAMIC: _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
