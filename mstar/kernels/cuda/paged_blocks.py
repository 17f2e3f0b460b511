"""What the paged attention kernels share: where a block of tokens lies in the cache, and one step of online softmax."""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
# Where a row's maximum starts: finite, so that rows that have seen no key need no case of their own.
LOWEST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def load_pages(pages, start, end, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """int32 [BLOCK_N], the page of each token from ``start`` on; ``pages`` points to the row's first."""
    token = start + tl.arange(0, BLOCK_N)
    return tl.load(pages + token // PAGE_SIZE, mask=token < end, other=0)


@triton.jit
def key_offsets(
    page, start, head, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """int64 [BLOCK_N], elements from a layer's begin to the keys of ``head``; values are
    ``PAGE_SIZE * KV_HEADS * HEAD_DIM`` further on."""
    token = start + tl.arange(0, BLOCK_N)
    row = page.to(tl.int64) * (2 * PAGE_SIZE) + token % PAGE_SIZE
    return row * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM


@triton.jit
def load_heads(first, offsets, is_token, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, IS_MASKED: tl.constexpr):
    """[BLOCK_N, BLOCK_D] of the cache; zeros where not ``is_token``: what lies there may be NaN."""
    dim = tl.arange(0, BLOCK_D)
    at = first + offsets[:, None] + dim[None, :]
    if HEAD_DIM != BLOCK_D:
        return tl.load(at, mask=is_token[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if IS_MASKED:
        return tl.load(at, mask=is_token[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def attend_block(q, k, v, is_seen, highest, total, acc, scale, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One more block of keys.

    Args:
        q: [M, D]; k, v: [N, D]; is_seen: bool [M, N] or [1, N], read where ``IS_MASKED``.
        highest, total: [M], highest score so far, and sum of ``exp2(score - highest)``; acc: [M, D] alike.
        scale: of scores, positive, times ``log2(e)``.

    Returns:
        New highest, total and acc.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if IS_MASKED:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_highest, total, acc
