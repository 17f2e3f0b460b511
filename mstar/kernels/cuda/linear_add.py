"""`x += y @ weight.T + bias` in one kernel, or in two where programs share an output's inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs
from mstar.kernels.cuda.products import load_weights, product, release_at
from mstar.kernels.cuda.streamed_linear_add import launch_streamed_linear_add_
from mstar.kernels.cuda.tiles import Tile

ADD_BLOCK = 1024


def launch_linear_add_(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> None:
    """`x` [n, out] += `y` [n, in] @ `weight` [out, in].T + `bias` [out], all contiguous and 16 bits wide."""
    if tile.way == "stream":
        launch_streamed_linear_add_(x, y, weight, bias, tile)
        return
    n, outputs = x.shape
    inputs = y.shape[1]
    is_split = tile.splits > 1
    to = x.new_empty(tile.splits, n, outputs, dtype=torch.float32) if is_split else x
    _linear_add[(outputs // tile.columns, triton.cdiv(n, tile.rows), tile.splits)](
        to, y, weight, weight if bias is None else bias, n,
        IN=inputs, SPAN=inputs // tile.splits, OUT=outputs, HAS_BIAS=bias is not None, IS_SPLIT=is_split,
        **tile.options(x, inputs),
    )  # fmt: skip
    if is_split:
        _add_parts[(triton.cdiv(n * outputs, ADD_BLOCK),)](
            x, to, n * outputs, PARTS=tile.splits, BLOCK=ADD_BLOCK, **launch_options(x, num_warps=4)
        )


@triton.jit(do_not_specialize=["n"])
def _linear_add(
    x_ptr, y_ptr, weight_ptr, bias_ptr, n,
    IN: tl.constexpr, SPAN: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SPLIT: tl.constexpr,
    WAY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr,
    REST: tl.constexpr, PREFETCH: tl.constexpr, RELEASE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    release_at("start", RELEASE, USE_PDL)
    columns = tl.program_id(0) * N + tl.arange(0, N)
    first_row = tl.program_id(1) * M
    part = tl.program_id(2)
    weight_ptr += part * SPAN
    weights = load_weights(weight_ptr, columns, IN, SPAN, WAY, SLICES, CHUNK, REST, PREFETCH)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns).to(tl.float32)
    wait_for_inputs(USE_PDL)
    release_at("waited", RELEASE, USE_PDL)
    rows = first_row + tl.arange(0, M)
    inside = (rows < n)[:, None]
    at = x_ptr + rows[:, None] * OUT + columns[None, :]
    if IS_SPLIT:
        at += part.to(tl.int64) * n * OUT
    elif WAY != "loop":  # there it would take registers from the sums
        before = tl.load(at, mask=inside, other=0.0)
    result = product(y_ptr + part * SPAN, weight_ptr, weights, columns, first_row, n, 0.0, IN, SPAN, False, WAY, M,
                     SLICES, CHUNK, REST)  # fmt: skip
    if not IS_SPLIT:
        if WAY == "loop":
            before = tl.load(at, mask=inside, other=0.0)
        result += before.to(tl.float32)
    if HAS_BIAS:
        result += tl.where(part == 0, bias, 0.0)[None, :]
    tl.store(at, result.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"])
def _add_parts(x_ptr, parts_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    release_dependents(USE_PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wait_for_inputs(USE_PDL)
    total = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * size + at, mask=inside, other=0.0)
    tl.store(x_ptr + at, total.to(x_ptr.dtype.element_ty), mask=inside)
