"""Row-wise operators between the linears: residual add with RMS norm, and SwiGLU, each one pass over its rows.

Beside weights that stream through the caches, every torch operator of a decode step runs cold and costs 20 to 100 us
on a CPU, however few rows it has.  There one kernel takes the place of two or three operators.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from mstar.kernels.cpu.jit import Worker, words
from mstar.kernels.cpu.row_ops_ir import add_rms_norm_ir, silu_mul_ir
from mstar.kernels.cpu.rows import row_kernel, row_threads


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x += delta``, then ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension as a new tensor.

    Args:
        x: [n, dim], overwritten with the sum.
        delta: [n, dim], or None to add nothing.
        weight: [dim].
    """
    if x.is_cuda and x.is_contiguous() and (delta is None or delta.is_contiguous()):
        from mstar.kernels.cuda.row_ops import add_rms_norm as on_gpu

        return on_gpu(x, delta, weight, eps)
    rows, dim = x.shape
    kernel = _norm_kernel(dim, eps, delta is not None) if _suits(x) and (delta is None or _suits(delta)) else None
    if kernel is None:
        return add_rms_norm_reference(x, delta, weight, eps)
    out = torch.empty_like(x)
    delta_address = 0 if delta is None else delta.data_ptr()
    kernel(words(rows, x.data_ptr(), delta_address, weight.data_ptr(), out.data_ptr()), row_threads(rows))
    return out


def add_rms_norm_reference(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """What :func:`add_rms_norm` must equal within float error."""
    if delta is not None:
        x.add_(delta)
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up`` [n, 2 * dim], gate first; a new [n, dim]."""
    rows, width = gate_up.shape
    kernel = _silu_kernel(width // 2) if _suits(gate_up) else None
    if kernel is None:
        return silu_mul_reference(gate_up)
    out = gate_up.new_empty(rows, width // 2)
    kernel(words(rows, gate_up.data_ptr(), out.data_ptr()), row_threads(rows))
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """What :func:`silu_mul` must equal within float error."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _suits(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()


@functools.cache
def _norm_kernel(dim: int, eps: float, has_delta: bool) -> Worker | None:
    return row_kernel("RMS norm", dim, lambda lanes: add_rms_norm_ir(dim, eps, has_delta, lanes))


@functools.cache
def _silu_kernel(dim: int) -> Worker | None:
    return row_kernel("SwiGLU", dim, lambda lanes: silu_mul_ir(dim, lanes))
