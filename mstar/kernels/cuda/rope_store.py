"""Norm of queries and keys, rotation, and the store of keys and values in the paged cache, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs
from mstar.kernels.cuda.row_ops import row_scale

HEADS_PER_PROGRAM = 8


def qk_norm_rope_store(
    heads: torch.Tensor,
    qk_norm_weight: torch.Tensor | None,
    qk_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_index: torch.Tensor,
    layer: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    normed_x: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`mstar.kernels.fused_linears.qk_norm_rope_store_reference`, in fp32 with one rounding.

    Args:
        heads: [n, num_heads + 2 * num_kv_heads, head_dim], contiguous: queries, keys, values.
        qk_norm_weight: [num_heads + num_kv_heads, head_dim], or None for no norm.
        cos, sin: [n, 1, rotary_dim], contiguous, any float dtype, rotary_dim even and at most head_dim.
        key_index: int64 [n], rows of the flat cache; values go `page_size` rows further.
        layer: [pages, 2, page_size, num_kv_heads, head_dim], contiguous, written.
        normed_x: [n, hidden], contiguous: `heads` is a product of it that is still to be divided by
            `sqrt(mean(normed_x^2) + eps)`, or None.
        bias: [(num_heads + 2 * num_kv_heads) * head_dim], added to `heads` thereafter, or None.

    Returns:
        The rotated queries, a new [n, num_heads, head_dim].
    """
    assert all(tensor.is_contiguous() for tensor in (heads, layer, cos, sin))
    n, count, head_dim = heads.shape
    assert count == num_heads + 2 * num_kv_heads
    rotary_dim = cos.shape[-1]
    queries = heads.new_empty(n, num_heads, head_dim)
    if not n:
        return queries
    rest = head_dim - rotary_dim
    _qk_norm_rope_store[(triton.cdiv(count, HEADS_PER_PROGRAM), n)](
        heads,
        heads if qk_norm_weight is None else qk_norm_weight,
        cos,
        sin,
        key_index,
        layer,
        queries,
        heads if normed_x is None else normed_x,
        heads if bias is None else bias,
        qk_eps,
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=head_dim,
        HALF=rotary_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(rotary_dim // 2),
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        PAGE=layer.shape[2],
        HAS_NORM=qk_norm_weight is not None,
        HIDDEN=0 if normed_x is None else normed_x.shape[1],
        HAS_BIAS=bias is not None,
        BLOCK=HEADS_PER_PROGRAM,
        **launch_options(heads, num_warps=4),
    )
    return queries


@triton.jit
def _qk_norm_rope_store(
    heads_ptr, weight_ptr, cos_ptr, sin_ptr, key_index_ptr, layer_ptr, queries_ptr, x_ptr, bias_ptr, qk_eps, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, PAGE: tl.constexpr, HAS_NORM: tl.constexpr, HIDDEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    release_dependents(USE_PDL)
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    turns = head < HEADS + KV_HEADS
    inside = (head < HEADS + 2 * KV_HEADS) & (pair < HALF)
    if HAS_BIAS:
        first_bias = tl.load(bias_ptr + head * DIM + pair, mask=inside, other=0.0).to(tl.float32)
        second_bias = tl.load(bias_ptr + head * DIM + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        first_weight = tl.load(weight_ptr + head * DIM + pair, mask=inside & turns, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + head * DIM + HALF + pair, mask=inside & turns, other=0.0).to(tl.float32)
    wait_for_inputs(USE_PDL)
    from_ptr = heads_ptr + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    first = tl.load(from_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(from_ptr + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * (2 * HALF) + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + row * (2 * HALF) + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * (2 * HALF) + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + row * (2 * HALF) + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    key_row = tl.load(key_index_ptr + row)
    # A key's row of the cache, or a value's, which lies a page further; queries have a tensor of their own.
    is_query = head < HEADS
    kv_head = tl.where(turns, head - HEADS, head - HEADS - KV_HEADS)
    cache_row = tl.where(turns, key_row, key_row + PAGE)
    to_query = queries_ptr + (row * HEADS + head) * DIM
    to_cache = layer_ptr + (cache_row * KV_HEADS + kv_head) * DIM
    if REST_BLOCK:
        other = tl.arange(0, REST_BLOCK)[None, :]
        other_inside = (head < HEADS + 2 * KV_HEADS) & (other < DIM - 2 * HALF)
        rest = tl.load(from_ptr + 2 * HALF + other, mask=other_inside, other=0.0).to(tl.float32)
    if HIDDEN:
        x_scale = row_scale(x_ptr, row, eps, HIDDEN)
        first *= x_scale
        second *= x_scale
        if REST_BLOCK:
            rest *= x_scale
    if HAS_BIAS:
        first += first_bias
        second += second_bias
        if REST_BLOCK:
            rest += tl.load(bias_ptr + head * DIM + 2 * HALF + other, mask=other_inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST_BLOCK:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIM + qk_eps)[:, None]
        first = tl.where(turns, first * scale * first_weight, first)
        second = tl.where(turns, second * scale * second_weight, second)
        if REST_BLOCK:
            rest_weight = tl.load(weight_ptr + head * DIM + 2 * HALF + other, mask=other_inside & turns, other=0.0)
            rest = tl.where(turns, rest * scale * rest_weight.to(tl.float32), rest)
    dtype = queries_ptr.dtype.element_ty
    out = tl.where(turns, first * cos + second * sin, first).to(dtype)
    out_second = tl.where(turns, second * cos_second + first * sin_second, second).to(dtype)
    tl.store(to_query + pair, out, mask=inside & is_query)
    tl.store(to_query + HALF + pair, out_second, mask=inside & is_query)
    tl.store(to_cache + pair, out, mask=inside & (head >= HEADS))
    tl.store(to_cache + HALF + pair, out_second, mask=inside & (head >= HEADS))
    if REST_BLOCK:
        tl.store(to_query + 2 * HALF + other, rest.to(dtype), mask=other_inside & is_query)
        tl.store(to_cache + 2 * HALF + other, rest.to(dtype), mask=other_inside & (head >= HEADS))
