"""Paged attention of one query per row: programs share a row's tokens out, and the last to end adds up the shares."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.decode_order import NO_PROGRAM, order_programs
from mstar.kernels.cuda.decode_shares import DecodeScratch, members_of, merge_shares, merged_at_once
from mstar.kernels.cuda.decode_split import DecodeSplit, choose_split, first_token, shares_of, span_of_share
from mstar.kernels.cuda.paged_blocks import LOG2_E, LOWEST, attend_block, key_offsets, load_heads, load_pages
from mstar.kernels.cuda.paged_prefill import paged_prefill
from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs

MAX_HEAD_DIM = 128  # blocks of wider heads, or of float32, are the prefill kernel's


def is_for_prefill(q: torch.Tensor, deterministic: bool) -> bool:
    """Whether the prefill kernel serves rows of one query too."""
    return deterministic or q.dtype == torch.float32 or q.shape[2] > MAX_HEAD_DIM


def paged_decode(
    q: torch.Tensor,
    layer: torch.Tensor,
    table: torch.Tensor,
    streams: torch.Tensor,
    kv_lens: torch.Tensor,
    scratch: DecodeScratch,
    *,
    scale: float | None = None,
    window: int | None = None,
    deterministic: bool = False,
    split: DecodeSplit | None = None,
    repeats_rows: bool = False,
    q_indptr: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`mstar.kernels.paged_attention.paged_decode_reference`.

    Args:
        q: [B, Hq, D] with contiguous heads; at most the rows of ``scratch``, and its heads.
        layer: contiguous.
        scale: positive.
        deterministic: a row's bits depend on its own keys alone, and are those of ``paged_prefill``.
        split: instead of the choice by shape.
        repeats_rows: an earlier call of the stream read the same ``table``, ``streams``, ``kv_lens`` and ``q_indptr``,
            unchanged since: these are read before the kernel in front has ended.
        q_indptr: int32 [B + 1] where ``q`` is [T, Hq, D]: row ``b``'s query is token ``q_indptr[b]``; rows that have
            none or several are left out, and their results not written.  Not in deterministic mode, nor for what
            the prefill kernel does.
        order: int32 [B * ROW_SHARES], where the order of programs is kept if the split has one: written by a call that
            repeats no rows, and read by those that repeat its rows.
        out: contiguous, of the shape of ``q``, to write instead of a new tensor.
    """
    num_rows, (_, num_heads, head_dim) = streams.shape[0], q.shape
    if is_for_prefill(q, deterministic):
        assert q_indptr is None
        assert out is None
        starts = scratch.row_starts[: num_rows + 1]
        return paged_prefill(
            q, layer, table, streams, kv_lens, starts, window=window, scale=scale, deterministic=deterministic
        )
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return out
    page_size, kv_heads = layer.shape[2], layer.shape[3]
    group = num_heads // kv_heads
    members, blocks = members_of(group)
    split = split or choose_split(num_rows, kv_heads * blocks, head_dim)
    shares = min(split.shares, shares_of(scratch.sums.shape[0], num_rows * kv_heads * blocks))
    block_members, block_d = triton.next_power_of_2(members), max(16, triton.next_power_of_2(head_dim))
    share_bits, spans = shares.bit_length() - 1, (split.whole_span, split.least_span)
    # Shares beyond the first come last: where rows are short they find nothing to do, and should not be in the way.
    grid: tuple[int, ...] = (kv_heads * blocks, num_rows, shares)
    if not split.longest_first or order is None or order.numel() < num_rows << share_bits:
        order = None
    else:
        grid = kv_heads * blocks, num_rows << share_bits
        if not repeats_rows:
            order_programs(order, streams, kv_lens, share_bits, *spans, window or 0, split.block_n)
    _decode_kernel[grid](
        out,
        q,
        layer,
        table,
        streams,
        kv_lens,
        q_indptr,
        order,
        scratch.sums,
        scratch.stats,
        scratch.arrived,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        share_bits,
        *spans,
        table.stride(0),
        q.stride(0),
        q.stride(1),
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        PAGE_SIZE=page_size,
        WINDOW=window or 0,
        MEMBERS=members,
        BLOCK_MEMBERS=block_members,
        BLOCK_M=split.block_m,
        BLOCK_N=split.block_n,
        MERGED=merged_at_once(block_members, block_d),
        IS_SHARED=shares > 1,
        READS_AHEAD=repeats_rows,
        FETCHES_AHEAD=repeats_rows and split.fetches_ahead,
        **launch_options(q, num_warps=split.num_warps, num_stages=split.num_stages),
    )
    return out


@triton.jit
def _fetch_lines(heads, is_token, HEAD_DIM: tl.constexpr):
    """Asks for the lines of ``heads`` [BLOCK_N], pointers to their begins, and takes none: the L2 cache also sees what
    a kernel stores there later."""
    LINE: tl.constexpr = 1024 // heads.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    for start in tl.static_range(0, HEAD_DIM, LINE):
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [(heads + start).to(tl.int64), is_token.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(
    do_not_specialize=["share_bits", "whole_span", "least_span", "table_stride"],
    do_not_specialize_on_alignment=["table", "streams", "kv_lens", "q_indptr", "order"],
)
def _decode_kernel(
    out,
    q,
    layer,
    table,
    streams,
    kv_lens,
    q_indptr,
    order,
    sums,
    stats,
    arrived,
    scale,
    share_bits,
    whole_span,
    least_span,
    table_stride,
    q_row_stride,
    q_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGED: tl.constexpr,
    IS_SHARED: tl.constexpr,
    READS_AHEAD: tl.constexpr,
    FETCHES_AHEAD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if not READS_AHEAD:
        wait_for_inputs(USE_PDL)
    row, share = tl.program_id(1), tl.program_id(2)
    if order is not None:
        entry = tl.load(order + tl.program_id(1))
        if entry == NO_PROGRAM:
            if tl.program_id(1) == 0:  # somebody has to, so that this kernel ends after those in front
                wait_for_inputs(USE_PDL)
            return
        row, share = entry >> share_bits, entry & ((1 << share_bits) - 1)
    kv_len, stream = tl.load(kv_lens + row), tl.load(streams + row)
    # There is no negative stream; but so it is read beside the lengths, rather than after them.
    token, is_idle = row, stream < 0
    if q_indptr is not None:
        token = tl.load(q_indptr + row)
        is_idle |= tl.load(q_indptr + row + 1) - token != 1
    begin = first_token(kv_len, WINDOW, BLOCK_N)
    end, num_tokens, span = kv_len, kv_len - begin, 0
    if IS_SHARED:
        span = span_of_share(num_tokens, share_bits, whole_span, least_span, BLOCK_N)
        begin += share * span
        end = tl.minimum(begin + span, kv_len)
        is_idle |= (share > 0) & (begin >= kv_len)
    pages = table + stream * table_stride
    page = load_pages(pages, begin, end, BLOCK_N, PAGE_SIZE)
    BLOCKS: tl.constexpr = (GROUP + MEMBERS - 1) // MEMBERS
    head, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    if READS_AHEAD:
        if FETCHES_AHEAD and USE_PDL:
            keys = layer + key_offsets(page, begin, head, BLOCK_N, PAGE_SIZE, KV_HEADS, HEAD_DIM)
            is_token = begin + tl.arange(0, BLOCK_N) < end
            _fetch_lines(keys, is_token, HEAD_DIM)
            _fetch_lines(keys + PAGE_SIZE * KV_HEADS * HEAD_DIM, is_token, HEAD_DIM)
        wait_for_inputs(USE_PDL)
    if IS_SHARED or q_indptr is not None:  # noqa: SIM102 (for the compiler to decide)
        if is_idle:
            return

    member, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_member = ((member < MEMBERS) & (block * MEMBERS + member < GROUP))[:, None] & (dim < HEAD_DIM)[None, :]
    first_head = head * GROUP + block * MEMBERS
    queries = q + token.to(tl.int64) * q_row_stride + (first_head + member)[:, None] * q_head_stride + dim[None, :]
    queries = tl.load(queries, mask=is_member, other=0.0)

    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    values = layer + PAGE_SIZE * KV_HEADS * HEAD_DIM
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        offsets = key_offsets(page, start, head, BLOCK_N, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        page = load_pages(pages, start + BLOCK_N, end, BLOCK_N, PAGE_SIZE)
        is_seen = key < end
        if WINDOW:
            is_seen = is_seen & (key >= kv_len - WINDOW)
        k = load_heads(layer, offsets, is_seen, BLOCK_D, HEAD_DIM, True).to(q.dtype.element_ty)
        v = load_heads(values, offsets, is_seen, BLOCK_D, HEAD_DIM, True).to(q.dtype.element_ty)
        highest, total, acc = attend_block(
            queries, k, v, is_seen[None, :], highest, total, acc, scale, True, PRECISION="tf32"
        )
    release_dependents(USE_PDL)

    heads = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + first_head) * HEAD_DIM
    at = heads + member[:, None] * HEAD_DIM + dim[None, :]
    result = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
    if IS_SHARED:
        if num_tokens <= span:
            tl.store(at, result, mask=is_member)
        else:
            pair, shares = row * tl.num_programs(0) + tl.program_id(0), tl.cdiv(num_tokens, span)
            first = pair << share_bits
            stat = stats + (first + share) * (2 * MEMBERS) + member
            tl.store(stat, highest, mask=member < MEMBERS)
            tl.store(stat + MEMBERS, total, mask=member < MEMBERS)
            sum_at = sums + ((first + share) * MEMBERS + member[:, None]) * HEAD_DIM + dim[None, :]
            tl.store(sum_at, acc, mask=is_member)
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu") == shares - 1:
                tl.store(arrived + pair, 0)
                merged = merge_shares(sums, stats, first, shares, HEAD_DIM, BLOCK_D, MEMBERS, BLOCK_MEMBERS, MERGED)
                merged_member = tl.arange(0, BLOCK_MEMBERS)
                is_merged = (merged_member < MEMBERS) & (block * MEMBERS + merged_member < GROUP)
                merged_at = heads + merged_member[:, None] * HEAD_DIM + dim[None, :]
                is_merged = is_merged[:, None] & (dim < HEAD_DIM)[None, :]
                tl.store(merged_at, merged.to(out.dtype.element_ty), mask=is_merged)
    else:
        tl.store(at, result, mask=is_member)
