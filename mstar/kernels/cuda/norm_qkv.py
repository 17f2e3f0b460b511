"""RMS norm, q/k/v projection, q/k norm, rotation and the store of keys and values in the cache, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import wait_for_inputs
from mstar.kernels.cuda.products import load_weights, product, release_at
from mstar.kernels.cuda.streamed_norm_qkv import launch_streamed_norm_qkv
from mstar.kernels.cuda.tiles import Tile


def launch_norm_qkv(
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
    """As `fused_linears.norm_qkv_rope_store_reference`, with heads of a power of two that turn as a whole.

    All contiguous, activations and weights 16 bits wide.  `tile.columns` divides a head; with a q/k norm it is one.
    Without `eps`, `x` is taken as it is.
    """
    assert cos.shape[-1] == head_dim == triton.next_power_of_2(head_dim)
    assert head_dim % tile.columns == 0
    assert qk_norm_weight is None or tile.columns == head_dim
    if tile.way == "stream":
        return launch_streamed_norm_qkv(
            x, eps, weight, bias, qk_norm_weight, qk_eps, cos, sin, key_index, layer,
            num_heads, num_kv_heads, head_dim, tile,
        )  # fmt: skip
    n, hidden = x.shape
    queries = x.new_empty(n, num_heads, head_dim)
    _norm_qkv[(weight.shape[0] // tile.columns, triton.cdiv(n, tile.rows))](
        x, weight, weight if bias is None else bias,
        weight if qk_norm_weight is None else qk_norm_weight, cos, sin, key_index, layer, queries, n,
        0.0 if eps is None else eps, qk_eps,
        IN=hidden, HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, PAGE=layer.shape[2],
        HAS_NORM=eps is not None, HAS_BIAS=bias is not None, HAS_QK_NORM=qk_norm_weight is not None,
        **tile.options(x, hidden),
    )  # fmt: skip
    return queries


@triton.jit(do_not_specialize=["n"])
def _norm_qkv(
    x_ptr, weight_ptr, bias_ptr, qk_norm_ptr, cos_ptr, sin_ptr, key_index_ptr, layer_ptr, queries_ptr,
    n, eps, qk_eps,
    IN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_QK_NORM: tl.constexpr, WAY: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr, PREFETCH: tl.constexpr,
    RELEASE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    release_at("start", RELEASE, USE_PDL)
    HALF: tl.constexpr = DIM // 2
    PAIRS: tl.constexpr = N // 2
    head = tl.program_id(0) // (DIM // N)
    first_pair = (tl.program_id(0) % (DIM // N)) * PAIRS
    # The two dims that turn together are neighbours in the tile: they lie in one thread's registers.
    beside = tl.arange(0, N)
    columns = head * DIM + first_pair + beside // 2 + (beside % 2) * HALF
    pair = first_pair + tl.arange(0, PAIRS)
    first_row = tl.program_id(1) * M
    rows = first_row + tl.arange(0, M)
    inside = rows < n
    turns = head < HEADS + KV_HEADS
    weights = load_weights(weight_ptr, columns, IN, IN, WAY, SLICES, CHUNK, REST, PREFETCH)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns).to(tl.float32)
    if HAS_QK_NORM:
        norm_head = qk_norm_ptr + tl.minimum(head, HEADS + KV_HEADS - 1) * DIM
        first_norm = tl.load(norm_head + pair).to(tl.float32)
        second_norm = tl.load(norm_head + HALF + pair).to(tl.float32)
    wait_for_inputs(USE_PDL)
    release_at("waited", RELEASE, USE_PDL)
    table = rows[:, None] * DIM + (HALF + pair)[None, :]
    if WAY != "loop":  # there they would take registers from the sums
        cos, sin = _tables(cos_ptr, sin_ptr, table, inside)
    key_row = tl.load(key_index_ptr + rows, mask=inside, other=0)
    both = product(x_ptr, weight_ptr, weights, columns, first_row, n, eps, IN, IN, HAS_NORM, WAY, M, SLICES, CHUNK,
                   REST)  # fmt: skip
    if WAY == "loop":
        cos, sin = _tables(cos_ptr, sin_ptr, table, inside)
    if HAS_BIAS:
        both += bias[None, :]
    first, second = tl.split(tl.reshape(both, (M, PAIRS, 2)))
    if HAS_QK_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + qk_eps)[:, None]
        first = tl.where(turns, first * scale * first_norm[None, :], first)
        second = tl.where(turns, second * scale * second_norm[None, :], second)
    turned = tl.where(turns, first * cos - second * sin, first).to(queries_ptr.dtype.element_ty)
    turned_second = tl.where(turns, second * cos + first * sin, second).to(queries_ptr.dtype.element_ty)
    if head < HEADS:
        to = queries_ptr + (rows * HEADS + head)[:, None] * DIM + pair[None, :]
        tl.store(to, turned, mask=inside[:, None])
        tl.store(to + HALF, turned_second, mask=inside[:, None])
    else:
        kv_head = tl.where(turns, head - HEADS, head - HEADS - KV_HEADS)
        cache_row = tl.where(turns, key_row, key_row + PAGE)
        to = layer_ptr + (cache_row * KV_HEADS + kv_head)[:, None] * DIM + pair[None, :]
        tl.store(to, turned, mask=inside[:, None])
        tl.store(to + HALF, turned_second, mask=inside[:, None])


@triton.jit
def _tables(cos_ptr, sin_ptr, at, inside):
    """Of the rows' pairs.  The tables' halves are alike but for the sine's sign, which is positive in the second."""
    cos = tl.load(cos_ptr + at, mask=inside[:, None], other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    return cos, sin
