"""Rotary position embedding (Su et al., 2021): cosine and sine tables of a step, and the rotation of heads."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from mstar.kernels.cpu.jit import Worker, words
from mstar.kernels.cpu.row_ops_ir import rotate_ir
from mstar.kernels.cpu.rows import row_kernel, row_threads


def cos_sin(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    interleave: bool,
    *,
    factor: float = 1.0,
    axes: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables that :func:`rotate` takes, fp32 [n, 1, rotary_dim] each.  The sine carries the sign of its dim.

    Args:
        positions: int64 [n]; with ``axes`` int64 [3, n].
        frequencies: fp32 [rotary_dim / 2], or [n, rotary_dim / 2] where tokens differ.
        factor: both are multiplied with it.
        axes: int64 [rotary_dim / 2] from :func:`axes_of`: which row of ``positions`` turns each pair.
        out: two tensors [n, 1, rotary_dim] of any float dtype to fill and return.
    """
    at = positions.float()
    angle = (at[:, None] if axes is None else at.index_select(0, axes).t()) * frequencies
    cos, sin = angle.cos(), angle.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if interleave:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    elif out is not None and out[0].dtype is torch.float32:
        torch.cat((cos, cos), -1, out=out[0][:, 0])
        torch.cat((-sin, sin), -1, out=out[1][:, 0])
        return out
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    if out is None:
        return cos[:, None], sin[:, None]
    return out[0].copy_(cos[:, None]), out[1].copy_(sin[:, None])


def axes_of(sections: Sequence[int], interleaved: bool) -> list[int]:
    """Which of three position axes (time, height, width) turns each pair; ``sections`` pairs per axis.

    Contiguous sections lie end to end (Qwen2-VL).  Interleaved ones alternate t h w t h w ... as far as height and
    width reach; the rest is time (Qwen3-VL).
    """
    if not interleaved:
        return [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return axes


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """Rotates the leading ``rotary_dim`` dims of each head.

    Args:
        x: [n, heads, head_dim]; cos, sin: [n, 1, rotary_dim] from :func:`cos_sin`.  Tables of another dtype than
            ``x`` are what the rotation is computed in.

    Returns:
        A new tensor like ``x``.
    """
    if cos.dtype != x.dtype:
        return rotate_reference(x.to(cos.dtype), cos, sin, interleave).to(x.dtype)
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
