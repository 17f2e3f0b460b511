"""Rotary position embedding (Su et al., 2021) and the scaling rules of its frequencies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mstar.kernels.cpu.jit import Worker, words
from mstar.kernels.cpu.row_ops_ir import rotate_ir
from mstar.kernels.cpu.rows import row_kernel, row_threads
from mstar.utils.errors import shorten


def inverse_frequencies(rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """Angle per position of each rotated pair, fp32 [rotary_dim / 2]: ``theta ** (-2 i / rotary_dim)``, scaled.

    Args:
        scaling: None, or a mapping with ``rope_type`` (or ``type``) and that type's numbers.

    Raises:
        ValueError: an unknown type, or a number that its type needs is missing; names it.
    """
    plain = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim))
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rule = _RULES.get(kind)
    if rule is None:
        raise ValueError(f"rope_type must be one of {', '.join(_RULES)}, got {shorten(kind)}")
    return rule(plain, scaling)


def cos_sin(positions: torch.Tensor, frequencies: torch.Tensor, interleave: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables that :func:`rotate` takes, fp32 [n, 1, rotary_dim] each.

    ``positions`` int64 [n]; ``frequencies`` fp32 [rotary_dim / 2].  The sine carries the sign of its dim.
    """
    angle = positions.float()[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    if interleave:
        return cos.repeat_interleave(2, -1)[:, None], torch.stack((-sin, sin), -1).flatten(-2)[:, None]
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """Rotates the leading ``rotary_dim`` dims of each head.

    Args:
        x: [n, heads, head_dim]; cos, sin: [n, 1, rotary_dim] from :func:`cos_sin`, dtype of ``x``.

    Returns:
        A new tensor like ``x``.
    """
    n, heads, dim = x.shape
    if interleave or not (x.is_cpu and x.dtype is torch.float32 and x.stride()[1:] == (dim, 1)):
        return rotate_reference(x, cos, sin, interleave)
    kernel = _rotate_kernel(dim, cos.shape[-1])
    if kernel is None or not (cos.is_contiguous() and sin.is_contiguous()):
        return rotate_reference(x, cos, sin, interleave)
    out = torch.empty(x.shape)
    addresses = [tensor.data_ptr() for tensor in (x, cos, sin, out)]
    kernel(words(n, heads, x.stride(0), *addresses), row_threads(n))
    return out


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """What :func:`rotate` must equal within float error."""
    rotary_dim = cos.shape[-1]
    head = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    if interleave:
        swapped = head.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        swapped = head.roll(rotary_dim // 2, -1)
    rotated = torch.addcmul(head * cos, swapped, sin)
    return rotated if head is x else torch.cat((rotated, x[..., rotary_dim:]), -1)


@functools.cache
def _rotate_kernel(dim: int, rotary_dim: int) -> Worker | None:
    run = math.gcd(rotary_dim // 2, dim)  # halves, and what is left of a head, are whole vectors
    return row_kernel("rotary embedding", run, lambda lanes: rotate_ir(dim, rotary_dim, lanes))


def _default(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    return plain


def _linear(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    return plain / _number(scaling, "factor")


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor, low, high, trained = (
        _number(scaling, key)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > trained / low, plain / factor, plain)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    is_between = ~(wavelength < trained / high) & ~(wavelength > trained / low)
    return torch.where(is_between, blended, stretched)


def _number(scaling: Mapping[str, Any], key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"rope scaling needs {key}, a finite number > 0, got {shorten(value)}")
    return value


_RULES: dict[Any, Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
}
