"""RMS norm, residual add with RMS norm, and SwiGLU on an NVIDIA GPU; references in `mstar/kernels/row_ops.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs

SILU_BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in fp32, rounded once.

    Args:
        x: [n, dim], contiguous, a float dtype; only read.
        weight: [dim], or None for ones.

    Returns:
        A new [n, dim].
    """
    return _norm(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x += delta`, rounded, then :func:`rms_norm` of it.

    Args:
        x: [n, dim], contiguous, overwritten with the sum.
        delta: [n, dim], contiguous, or None to add nothing.
        weight: [dim].
    """
    return _norm(x, delta, weight, eps)


def silu_mul(
    gate_up: torch.Tensor,
    *,
    normed_x: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`silu(gate) * up`, in fp32, rounded once.

    Args:
        gate_up: [n, 2 * dim], contiguous, gate first.
        normed_x: [n, hidden], contiguous: `gate_up` is a product of it that is still to be divided by
            `sqrt(mean(normed_x^2) + eps)`, or None.
        bias: [2 * dim], added to `gate_up` thereafter, or None.

    Returns:
        A new [n, dim].
    """
    assert gate_up.is_contiguous()
    assert normed_x is None or normed_x.is_contiguous()
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, dim)
    if rows:
        grid = (triton.cdiv(dim, SILU_BLOCK), rows)
        hidden = 0 if normed_x is None else normed_x.shape[1]
        _silu_mul[grid](
            gate_up, out, gate_up if normed_x is None else normed_x, gate_up if bias is None else bias, eps,
            dim, hidden, bias is not None, SILU_BLOCK, **launch_options(gate_up, num_warps=4),
        )  # fmt: skip
    return out


def _norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    assert x.is_contiguous()
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape)
    rows, dim = x.shape
    out = torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(dim)
        options = launch_options(x, num_warps=4 if block <= 4096 else 8)
        _add_rms_norm[(rows,)](
            x, x if delta is None else delta, x if weight is None else weight, out, eps,
            dim, block, delta is not None, weight is not None, **options,
        )  # fmt: skip
    return out


@triton.jit
def _add_rms_norm(
    x_ptr, delta_ptr, weight_ptr, out_ptr, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_WEIGHT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    release_dependents(USE_PDL)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(USE_PDL)
    here = tl.program_id(0).to(tl.int64) * DIM + at
    x = tl.load(x_ptr + here, mask=inside, other=0.0)
    if HAS_DELTA:
        x = (x.to(tl.float32) + tl.load(delta_ptr + here, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + here, x, mask=inside)
    x = x.to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    if HAS_WEIGHT:
        out *= weight
    tl.store(out_ptr + here, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_scale(x_ptr, row, eps, DIM: tl.constexpr):
    """`1 / sqrt(mean(x^2) + eps)` of row `row` (int64) of `x` [.., DIM], fp32."""
    at = tl.arange(0, triton.next_power_of_2(DIM))
    x = tl.load(x_ptr + row * DIM + at, mask=at < DIM, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)


@triton.jit
def _silu_mul(
    gate_up_ptr, out_ptr, x_ptr, bias_ptr, eps,
    DIM: tl.constexpr, HIDDEN: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    release_dependents(USE_PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = at < DIM
    wait_for_inputs(USE_PDL)
    gate = tl.load(gate_up_ptr + row * (2 * DIM) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * DIM) + DIM + at, mask=inside, other=0.0).to(tl.float32)
    if HIDDEN:
        scale = row_scale(x_ptr, row, eps, HIDDEN)
        gate *= scale
        up *= scale
    if HAS_BIAS:
        gate += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + DIM + at, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * DIM + at, out.to(out_ptr.dtype.element_ty), mask=inside)
