"""`rms_norm(x) @ weight.T + bias` in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import wait_for_inputs
from mstar.kernels.cuda.products import load_weights, product, release_at
from mstar.kernels.cuda.tiles import Tile


def launch_norm_linear(
    x: torch.Tensor, eps: float | None, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    """`x` [n, in], `weight` [out, in], `bias` [out] -> a new [n, out]; all contiguous and 16 bits wide.

    Without `eps`, `x` is taken as it is.
    """
    n, inputs = x.shape
    outputs = weight.shape[0]
    out = x.new_empty(n, outputs)
    _norm_linear[(outputs // tile.columns, triton.cdiv(n, tile.rows))](
        x, weight, weight if bias is None else bias, out, n, 0.0 if eps is None else eps,
        IN=inputs, OUT=outputs, HAS_NORM=eps is not None, HAS_BIAS=bias is not None, **tile.options(x, inputs),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n"])
def _norm_linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, n, eps,
    IN: tl.constexpr, OUT: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, WAY: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr,
    PREFETCH: tl.constexpr, RELEASE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    release_at("start", RELEASE, USE_PDL)
    columns = tl.program_id(0) * N + tl.arange(0, N)
    first_row = tl.program_id(1) * M
    weights = load_weights(weight_ptr, columns, IN, IN, WAY, SLICES, CHUNK, REST, PREFETCH)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns).to(tl.float32)
    wait_for_inputs(USE_PDL)
    release_at("waited", RELEASE, USE_PDL)
    result = product(x_ptr, weight_ptr, weights, columns, first_row, n, eps, IN, IN, HAS_NORM, WAY, M, SLICES, CHUNK,
                     REST)  # fmt: skip
    release_at("product", RELEASE, USE_PDL)
    if HAS_BIAS:
        result += bias[None, :]
    rows = first_row + tl.arange(0, M)
    at = out_ptr + rows[:, None] * OUT + columns[None, :]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=(rows < n)[:, None])
