"""RMS norm, q/k/v projection, q/k norm, rotation and the store of keys and values, from streams of TMA copies."""

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


def launch_streamed_norm_qkv(
    x: torch.Tensor,
    eps: float | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    qk_norm_weight: torch.Tensor | None,
    qk_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_index: torch.Tensor,
    layer: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tile: Tile,
) -> torch.Tensor:
    """As `launch_norm_qkv`, with a tile of the way "stream"."""
    n, hidden = x.shape
    queries = x.new_empty(n, num_heads, head_dim)
    _streamed_norm_qkv[(weight.shape[0] // tile.columns, triton.cdiv(n, tile.rows))](
        describe_inputs(x, tile.rows, tile.chunk), describe_weight(weight, tile.columns, tile.chunk, head_dim // 2),
        weight if bias is None else bias, weight if qk_norm_weight is None else qk_norm_weight, cos, sin, key_index,
        layer, queries, n, 0.0 if eps is None else eps, qk_eps,
        IN=hidden, HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, PAGE=layer.shape[2],
        HAS_NORM=eps is not None, HAS_BIAS=bias is not None, HAS_QK_NORM=qk_norm_weight is not None,
        **tile.stream_options(x, hidden, has_squares=True),
    )  # fmt: skip
    return queries


@gluon.jit(do_not_specialize=["n"])
def _streamed_norm_qkv(
    x_desc, weight_desc, bias_ptr, qk_norm_ptr, cos_ptr, sin_ptr, key_index_ptr, layer_ptr, queries_ptr, n, eps, qk_eps,
    IN: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_QK_NORM: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = DIM // 2
    PAIRS: gl.constexpr = N // 2
    OUT: gl.constexpr = out_layout(PAIRS, gl.num_warps())
    head = gl.program_id(0) // (DIM // N)
    first_pair = (gl.program_id(0) % (DIM // N)) * PAIRS
    first_row = gl.program_id(1) * M
    stream = open_stream(x_desc, weight_desc, STAGES, HAS_NORM)
    pair = first_pair + gl.arange(0, PAIRS, gl.SliceLayout(0, OUT))
    rows = first_row + gl.arange(0, M, gl.SliceLayout(1, OUT))
    turns = head < HEADS + KV_HEADS
    if HAS_BIAS:
        first_bias = gl.load(bias_ptr + head * DIM + pair).to(gl.float32)
        second_bias = gl.load(bias_ptr + head * DIM + HALF + pair).to(gl.float32)
    if HAS_QK_NORM:
        norm_head = qk_norm_ptr + gl.minimum(head, HEADS + KV_HEADS - 1) * DIM
        first_norm = gl.load(norm_head + pair).to(gl.float32)
        second_norm = gl.load(norm_head + HALF + pair).to(gl.float32)
    # The tables' halves are alike but for the sine's sign, which is positive in the second.
    table = rows[:, None] * DIM + (HALF + pair)[None, :]
    sums, cos, sin, key_row = gl.warp_specialize([
        (_multiply_with_tables, (stream, cos_ptr, sin_ptr, key_index_ptr, table, rows, n, N, COUNT, STAGES, USE_PDL)),
        (ask, (x_desc, weight_desc, stream, 2 * head, first_pair, first_row, COUNT, STAGES, USE_PDL)),
        (square, (stream, COUNT, STAGES, HAS_NORM)),
    ], [ASK_WARPS, SQUARE_WARPS], [ASK_REGISTERS, SQUARE_REGISTERS])  # fmt: skip
    if HAS_NORM:
        sums = normed(sums, stream, eps, IN)
    first, second = halves(sums)
    if HAS_BIAS:
        first += first_bias[None, :]
        second += second_bias[None, :]
    if HAS_QK_NORM:
        scale = gl.rsqrt(gl.sum(first * first + second * second, 1) / DIM + qk_eps)[:, None]
        first = gl.where(turns, first * scale * first_norm[None, :], first)
        second = gl.where(turns, second * scale * second_norm[None, :], second)
    turned = gl.where(turns, first * cos - second * sin, first).to(queries_ptr.dtype.element_ty)
    turned_second = gl.where(turns, second * cos + first * sin, second).to(queries_ptr.dtype.element_ty)
    inside = (rows < n)[:, None]
    if head < HEADS:
        to = queries_ptr + (rows * HEADS + head)[:, None] * DIM + pair[None, :]
        gl.store(to, turned, mask=inside)
        gl.store(to + HALF, turned_second, mask=inside)
    else:
        kv_head = gl.where(turns, head - HEADS, head - HEADS - KV_HEADS)
        cache_row = gl.where(turns, key_row, key_row + PAGE)
        to = layer_ptr + (cache_row * KV_HEADS + kv_head)[:, None] * DIM + pair[None, :]
        gl.store(to, turned, mask=inside)
        gl.store(to + HALF, turned_second, mask=inside)


@gluon.jit
def _multiply_with_tables(
    stream, cos_ptr, sin_ptr, key_index_ptr, table, rows, n,
    N: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    wait_for_inputs(USE_PDL)
    release_dependents(USE_PDL)
    inside = rows < n
    cos = gl.load(cos_ptr + table, mask=inside[:, None], other=1.0).to(gl.float32)
    sin = gl.load(sin_ptr + table, mask=inside[:, None], other=0.0).to(gl.float32)
    key_row = gl.load(key_index_ptr + rows, mask=inside, other=0)
    return multiply(stream, N, COUNT, STAGES), cos, sin, key_row
