"""`rms_norm(x) @ weight.T + bias`, or SwiGLU of it, from streams of TMA copies."""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mstar.kernels.cuda.pdl import release_dependents, wait_for_inputs
from mstar.kernels.cuda.streams import (
    ASK_REGISTERS,
    ASK_WARPS,
    SQUARE_REGISTERS,
    SQUARE_WARPS,
    ask,
    describe_inputs,
    describe_weight,
    halves,
    multiply,
    normed,
    open_stream,
    out_layout,
    square,
)
from mstar.kernels.cuda.tiles import Tile


def launch_streamed_norm_linear(
    x: torch.Tensor,
    eps: float | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """As `launch_norm_linear`, with a tile of the way "stream"."""
    n, inputs = x.shape
    outputs = weight.shape[0]
    width = outputs // 2 if is_gated else outputs
    out = x.new_empty(n, width)
    _streamed_norm_linear[(outputs // tile.columns, triton.cdiv(n, tile.rows))](
        describe_inputs(x, tile.rows, tile.chunk),
        describe_weight(weight, tile.columns, tile.chunk, width if is_gated else 0),
        weight if bias is None else bias, out, n, 0.0 if eps is None else eps,
        IN=inputs, WIDTH=width, IS_GATED=is_gated, HAS_NORM=eps is not None, HAS_BIAS=bias is not None,
        **tile.stream_options(x, inputs, has_squares=True),
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["n"])
def _streamed_norm_linear(
    x_desc, weight_desc, bias_ptr, out_ptr, n, eps,
    IN: gl.constexpr, WIDTH: gl.constexpr, IS_GATED: gl.constexpr, HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    OUTS: gl.constexpr = N // 2 if IS_GATED else N  # that come out
    OUT: gl.constexpr = out_layout(OUTS, gl.num_warps())
    row = gl.program_id(0) * OUTS
    first_row = gl.program_id(1) * M
    stream = open_stream(x_desc, weight_desc, STAGES, HAS_NORM)
    columns = row + gl.arange(0, OUTS, gl.SliceLayout(0, OUT))
    if HAS_BIAS:
        bias = gl.load(bias_ptr + columns).to(gl.float32)
        if IS_GATED:
            up_bias = gl.load(bias_ptr + WIDTH + columns).to(gl.float32)
    sums = gl.warp_specialize([
        (_multiply_waited, (stream, N, COUNT, STAGES, USE_PDL)),
        (ask, (x_desc, weight_desc, stream, 0, row, first_row, COUNT, STAGES, USE_PDL)),
        (square, (stream, COUNT, STAGES, HAS_NORM)),
    ], [ASK_WARPS, SQUARE_WARPS], [ASK_REGISTERS, SQUARE_REGISTERS])[0]  # fmt: skip
    if HAS_NORM:
        sums = normed(sums, stream, eps, IN)
    rows = first_row + gl.arange(0, M, gl.SliceLayout(1, OUT))
    if IS_GATED:
        gate, up = halves(sums)
        if HAS_BIAS:
            gate += bias[None, :]
            up += up_bias[None, :]
        out = gate / (1.0 + gl.exp(-gate)) * up
    else:
        out = gl.convert_layout(sums, OUT)
        if HAS_BIAS:
            out += bias[None, :]
    at = out_ptr + rows[:, None] * WIDTH + columns[None, :]
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=(rows < n)[:, None])


@gluon.jit
def _multiply_waited(stream, N: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr):
    wait_for_inputs(USE_PDL)
    release_dependents(USE_PDL)
    return (multiply(stream, N, COUNT, STAGES),)
