"""Paged attention of rows of any number of queries: tiles of one row's (token, query head) pairs by blocks of keys.

The query heads of one kv head lie beside one another in a tile, so that keys are read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.paged_blocks import LOG2_E, LOWEST, attend_block, key_offsets, load_heads, load_pages
from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs

ROWS_AT_ONCE = 256  # of q_indptr, when a program looks for its row


@dataclass(frozen=True)
class PrefillTile:
    """``block_m`` (token, head) pairs by ``block_n`` keys, a multiple of the page size or a divisor."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tile(num_pairs: int, dtype: torch.dtype, head_dim: int, deterministic: bool) -> PrefillTile:
    """``num_pairs``: (token, query head) pairs of a call.

    Tiles of 128 save reads and matrix instructions once there are enough of them to fill the multiprocessors; until
    then more programs of 64 end sooner.  In deterministic mode the tile is always the same.
    """
    if dtype == torch.float32:  # multiplied without tensor cores, out of registers
        return PrefillTile(16, 16 if head_dim > 128 else 32, 4, 2)
    if head_dim > 128:
        return PrefillTile(64, 32, 4, 2)
    if deterministic or num_pairs < 32 * 1024:
        return PrefillTile(64, 64, 4, 3)
    return PrefillTile(128, 64, 8, 3)


def paged_prefill(
    q: torch.Tensor,
    layer: torch.Tensor,
    table: torch.Tensor,
    streams: torch.Tensor,
    kv_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    tile: PrefillTile | None = None,
    skips_single: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`mstar.kernels.paged_attention.paged_prefill_reference`.

    Args:
        q: [T, Hq, D] with contiguous heads.
        layer: contiguous.
        scale: positive.
        deterministic: a token's bits depend on its own keys alone, and are those of ``paged_decode``.
        tile: instead of the choice by shape.
        skips_single: rows of one query are left out, and their results not written.
        out: contiguous [T, Hq, D] to write instead of a new tensor.
    """
    num_tokens, num_heads, head_dim = q.shape
    page_size, kv_heads = layer.shape[2], layer.shape[3]
    group, num_rows = num_heads // kv_heads, streams.shape[0]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    tile = tile or choose_tile(num_tokens * num_heads, q.dtype, head_dim, deterministic)
    # Every row may end in a tile that is not full, and so may the padding.
    most_rows = min(num_rows, num_tokens // 2 if skips_single else num_tokens) + 1
    num_tiles = (num_tokens * group + most_rows * (tile.block_m - 1)) // tile.block_m
    _prefill_kernel[(kv_heads, num_tiles)](
        out,
        q,
        layer,
        table,
        streams,
        kv_lens,
        q_indptr,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        num_tokens,
        num_rows,
        table.stride(0),
        q.stride(0),
        q.stride(1),
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PAGE_SIZE=page_size,
        WINDOW=window or 0,
        IS_CAUSAL=causal,
        IS_FIXED=deterministic,
        SKIPS_SINGLE=skips_single,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_ROWS=ROWS_AT_ONCE,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **launch_options(q, num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return out


@triton.jit
def _find_tile(
    q_indptr,
    number,
    num_tokens,
    num_rows,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SKIPS_SINGLE: tl.constexpr,
):
    """The row of a tile and the tiles behind that row, when tiles are numbered from the last row's last.

    Padding tokens are row ``num_rows``; where there is no such tile the row is negative.
    """
    num_tiles = tl.cdiv((num_tokens - tl.load(q_indptr + num_rows)) * GROUP, BLOCK_M)
    row = num_rows - (num_tiles <= number).to(tl.int32)
    behind = tl.where(num_tiles <= number, num_tiles, 0)
    for chunk in tl.range(0, num_rows, BLOCK_ROWS, num_stages=1):
        index = num_rows - 1 - chunk - tl.arange(0, BLOCK_ROWS)
        begin = tl.load(q_indptr + index, mask=index >= 0, other=0)
        end = tl.load(q_indptr + index + 1, mask=index >= 0, other=0)
        tiles = tl.cdiv((end - begin) * GROUP, BLOCK_M)
        if SKIPS_SINGLE:
            tiles = tl.where(end - begin == 1, 0, tiles)
        ends = num_tiles + tl.cumsum(tiles)
        is_behind = ends <= number
        row -= tl.sum(is_behind.to(tl.int32))
        behind = tl.maximum(behind, tl.max(tl.where(is_behind, ends, 0)))
        num_tiles = tl.max(ends)
    return row, behind


@triton.jit
def _attend_keys(
    q,
    layer,
    pages,
    head,
    position,
    begin,
    end,
    highest,
    total,
    acc,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Blocks of keys from ``begin`` until ``end``; unmasked ones are whole and seen by every query of the tile."""
    page = load_pages(pages, begin, end, BLOCK_N, PAGE_SIZE)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        offsets = key_offsets(page, start, head, BLOCK_N, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        page = load_pages(pages, start + BLOCK_N, end, BLOCK_N, PAGE_SIZE)
        k = load_heads(layer, offsets, key < end, BLOCK_D, HEAD_DIM, IS_MASKED)
        values = layer + PAGE_SIZE * KV_HEADS * HEAD_DIM
        v = load_heads(values, offsets, key < end, BLOCK_D, HEAD_DIM, IS_MASKED)
        is_seen = (key < end)[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (key[None, :] <= position[:, None])
        if WINDOW:
            is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
        highest, total, acc = attend_block(
            q, k.to(q.dtype), v.to(q.dtype), is_seen, highest, total, acc, scale, IS_MASKED, PRECISION
        )
    return highest, total, acc


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "table_stride"],
    do_not_specialize_on_alignment=["table", "streams", "kv_lens", "q_indptr"],
)
def _prefill_kernel(
    out,
    q,
    layer,
    table,
    streams,
    kv_lens,
    q_indptr,
    scale,
    num_tokens,
    num_rows,
    table_stride,
    q_token_stride,
    q_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_FIXED: tl.constexpr,
    SKIPS_SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    head = tl.program_id(0)
    number = tl.program_id(1)  # from the end, since a row's last tiles have most keys and should start first
    row, behind = _find_tile(q_indptr, number, num_tokens, num_rows, GROUP, BLOCK_M, BLOCK_ROWS, SKIPS_SINGLE)
    if row < 0:
        return
    is_row = row < num_rows
    begin = tl.load(q_indptr + row)
    end = tl.load(q_indptr + row + 1, mask=is_row, other=num_tokens)
    kv_len = tl.load(kv_lens + row, mask=is_row, other=0)
    pages = table + tl.load(streams + row, mask=is_row, other=0) * table_stride

    first_pair = (tl.cdiv((end - begin) * GROUP, BLOCK_M) - 1 - (number - behind)) * BLOCK_M
    pair = first_pair + tl.arange(0, BLOCK_M)
    token = begin + pair // GROUP
    position = kv_len - end + token
    dim = tl.arange(0, BLOCK_D)
    is_pair = (token < end)[:, None] & (dim < HEAD_DIM)[None, :]
    query_head = head * GROUP + pair % GROUP
    queries = q + token.to(tl.int64)[:, None] * q_token_stride + query_head[:, None] * q_head_stride + dim[None, :]
    queries = tl.load(queries, mask=is_pair, other=0.0)

    # Keys from `low` to `high` are seen by some query of the tile, those from `low_all` to `high_all` by every one.
    first = kv_len - end + begin + first_pair // GROUP
    last = tl.minimum(kv_len - end + begin + (first_pair + BLOCK_M - 1) // GROUP, kv_len - 1)
    low, low_all, high, high_all = 0, 0, kv_len, kv_len
    if IS_CAUSAL:
        high, high_all = last + 1, first + 1
    high_all = tl.maximum(high_all, 0) // BLOCK_N * BLOCK_N
    if WINDOW:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        low_all = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
        low_all = tl.maximum(tl.minimum(low_all, high), low)
        high_all = tl.maximum(high_all, low_all)
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # fmt: off
    if IS_FIXED:  # one loop for all blocks, since the compiler may round differently in another
        highest, total, acc = _attend_keys(
            queries, layer, pages, head, position, low, high, highest, total, acc, scale,
            KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, WINDOW, IS_CAUSAL, True, BLOCK_N, PRECISION,
        )
    else:
        if WINDOW:
            highest, total, acc = _attend_keys(
                queries, layer, pages, head, position, low, low_all, highest, total, acc, scale,
                KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, WINDOW, IS_CAUSAL, True, BLOCK_N, PRECISION,
            )
        highest, total, acc = _attend_keys(
            queries, layer, pages, head, position, low_all, high_all, highest, total, acc, scale,
            KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, WINDOW, IS_CAUSAL, False, BLOCK_N, PRECISION,
        )
        highest, total, acc = _attend_keys(
            queries, layer, pages, head, position, high_all, high, highest, total, acc, scale,
            KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, WINDOW, IS_CAUSAL, True, BLOCK_N, PRECISION,
        )
    # fmt: on
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = out + (token.to(tl.int64)[:, None] * (KV_HEADS * GROUP) + query_head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_pair)
