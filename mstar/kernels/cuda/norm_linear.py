"""`rms_norm(x) @ weight.T + bias`, or SwiGLU of it, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import wait_for_inputs
from mstar.kernels.cuda.products import load_weights, product, release_at
from mstar.kernels.cuda.streamed_norm_linear import launch_streamed_norm_linear
from mstar.kernels.cuda.tiles import Tile


def launch_norm_linear(
    x: torch.Tensor,
    eps: float | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """`x` [n, in], `weight` [out, in], `bias` [out] -> a new [n, out]; all contiguous and 16 bits wide.

    Without `eps`, `x` is taken as it is.  With `is_gated`, the first half of the outputs are gates of the second:
    `silu(gate) * up`, a new [n, out / 2]; `tile.columns` counts both.
    """
    if tile.way == "stream":
        return launch_streamed_norm_linear(x, eps, weight, bias, tile, is_gated=is_gated)
    n, inputs = x.shape
    outputs = weight.shape[0]
    width = outputs // 2 if is_gated else outputs
    out = x.new_empty(n, width)
    _norm_linear[(outputs // tile.columns, triton.cdiv(n, tile.rows))](
        x, weight, weight if bias is None else bias, out, n, 0.0 if eps is None else eps,
        IN=inputs, WIDTH=width, IS_GATED=is_gated, HAS_NORM=eps is not None, HAS_BIAS=bias is not None,
        **tile.options(x, inputs),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n"])
def _norm_linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, n, eps,
    IN: tl.constexpr, WIDTH: tl.constexpr, IS_GATED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    WAY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr,
    REST: tl.constexpr, PREFETCH: tl.constexpr, RELEASE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    release_at("start", RELEASE, USE_PDL)
    beside = tl.arange(0, N)
    if IS_GATED:
        # Gate and up of an output are neighbours in the tile: they lie in one thread's registers, none are exchanged.
        columns = tl.program_id(0) * (N // 2) + beside // 2 + (beside % 2) * WIDTH
    else:
        columns = tl.program_id(0) * N + beside
    first_row = tl.program_id(1) * M
    weights = load_weights(weight_ptr, columns, IN, IN, WAY, SLICES, CHUNK, REST, PREFETCH)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns).to(tl.float32)
    wait_for_inputs(USE_PDL)
    release_at("waited", RELEASE, USE_PDL)
    result = product(x_ptr, weight_ptr, weights, columns, first_row, n, eps, IN, IN, HAS_NORM, WAY, M, SLICES, CHUNK,
                     REST)  # fmt: skip
    if HAS_BIAS:
        result += bias[None, :]
    rows = first_row + tl.arange(0, M)
    if IS_GATED:
        gate, up = tl.split(tl.reshape(result, (M, N // 2, 2)))
        out = gate * tl.sigmoid(gate) * up
        at = tl.program_id(0) * (N // 2) + tl.arange(0, N // 2)
    else:
        out, at = result, columns
    tl.store(out_ptr + rows[:, None] * WIDTH + at[None, :], out.to(out_ptr.dtype.element_ty), mask=(rows < n)[:, None])
