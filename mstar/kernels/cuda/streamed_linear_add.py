"""`x += y @ weight.T + bias` from streams of TMA copies."""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mstar.kernels.cuda.pdl import release_dependents, wait_for_inputs
from mstar.kernels.cuda.streams import (
    ASK_REGISTERS,
    ASK_WARPS,
    ask,
    describe_inputs,
    describe_weight,
    multiply,
    open_stream,
    out_layout,
)
from mstar.kernels.cuda.tiles import Tile


def launch_streamed_linear_add_(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> None:
    """As `launch_linear_add_`, with a tile of the way "stream"."""
    n, outputs = x.shape
    _streamed_linear_add[(outputs // tile.columns, triton.cdiv(n, tile.rows))](
        describe_inputs(y, tile.rows, tile.chunk), describe_weight(weight, tile.columns, tile.chunk),
        weight if bias is None else bias, x, n,
        OUT=outputs, HAS_BIAS=bias is not None, **tile.stream_options(x, y.shape[1], has_squares=False),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["n"])
def _streamed_linear_add(
    y_desc, weight_desc, bias_ptr, x_ptr, n,
    OUT: gl.constexpr, HAS_BIAS: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    TO: gl.constexpr = out_layout(N, gl.num_warps())
    column = gl.program_id(0) * N
    first_row = gl.program_id(1) * M
    stream = open_stream(y_desc, weight_desc, STAGES, False)
    columns = column + gl.arange(0, N, gl.SliceLayout(0, TO))
    rows = first_row + gl.arange(0, M, gl.SliceLayout(1, TO))
    inside = (rows < n)[:, None]
    at = x_ptr + rows[:, None] * OUT + columns[None, :]
    if HAS_BIAS:
        bias = gl.load(bias_ptr + columns).to(gl.float32)
    sums, before = gl.warp_specialize([
        (_multiply_waited, (stream, at, inside, N, COUNT, STAGES, USE_PDL)),
        (ask, (y_desc, weight_desc, stream, 0, column, first_row, COUNT, STAGES, USE_PDL)),
    ], [ASK_WARPS], [ASK_REGISTERS])  # fmt: skip
    sums = gl.convert_layout(sums, TO) + before.to(gl.float32)
    if HAS_BIAS:
        sums += bias[None, :]
    gl.store(at, sums.to(x_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _multiply_waited(
    stream, at, inside, N: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr
):
    """The sums, and what they are added to."""
    wait_for_inputs(USE_PDL)
    release_dependents(USE_PDL)
    before = gl.load(at, mask=inside, other=0.0)
    return multiply(stream, N, COUNT, STAGES), before
