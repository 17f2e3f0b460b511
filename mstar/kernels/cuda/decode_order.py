"""In which order the programs of decode attention begin: those of most tokens first, so that short ones end together.

Programs are as long as their rows, and a multiprocessor takes the next one when one ends.  In order of the rows a long
one may begin last, and all wait for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.decode_split import first_token, span_of_share
from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs

ROWS = 32  # of a program
ROWS_AT_ONCE = 128  # that it compares them to
NO_PROGRAM = tl.constexpr(-1)


def order_programs(
    order: torch.Tensor,
    streams: torch.Tensor,
    kv_lens: torch.Tensor,
    share_bits: int,
    whole_span: int,
    least_span: int,
    window: int,
    block_n: int,
) -> None:
    """Writes which share of which row each program takes.

    Args:
        order: int32 [B << share_bits], written: ``row << share_bits | share`` in the order in which programs begin, of
            equal ones the earlier row first, and ``NO_PROGRAM`` behind them.
        streams, kv_lens: int32 [B]; a row of no stream or no tokens has one program.
        share_bits, whole_span, least_span, block_n: as :func:`span_of_share` takes them.
        window: tokens that are read at most, and those before them in their block; 0 for all.
    """
    num_rows = streams.numel()
    _order_kernel[(triton.cdiv(num_rows, ROWS),)](
        order,
        streams,
        kv_lens,
        num_rows,
        share_bits,
        whole_span,
        least_span,
        WINDOW=window,
        BLOCK_N=block_n,
        SHARES=1 << share_bits,
        ROWS=ROWS,
        ROWS_AT_ONCE=ROWS_AT_ONCE,
        **launch_options(order, num_warps=4),
    )


@triton.jit
def _programs(
    rows,
    num_rows,
    streams,
    kv_lens,
    share_bits,
    whole_span,
    least_span,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of ``rows``: programs of each, none past the last row, and tokens of the longest of them."""
    is_row = rows < num_rows
    kv_len = tl.load(kv_lens + rows, mask=is_row, other=0)
    has_stream = tl.load(streams + rows, mask=is_row, other=-1) >= 0
    num_tokens = tl.where(has_stream, kv_len - first_token(kv_len, WINDOW, BLOCK_N), 0)
    span = span_of_share(num_tokens, share_bits, whole_span, least_span, BLOCK_N)
    count = tl.where(is_row, tl.maximum(tl.cdiv(num_tokens, span), 1), 0)
    return count, tl.minimum(span, num_tokens)


@triton.jit(
    do_not_specialize=["num_rows", "share_bits", "whole_span", "least_span"],
    do_not_specialize_on_alignment=["streams", "kv_lens", "order"],
)
def _order_kernel(
    order,
    streams,
    kv_lens,
    num_rows,
    share_bits,
    whole_span,
    least_span,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    # fmt: off
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count, tokens = _programs(
        row, num_rows, streams, kv_lens, share_bits, whole_span, least_span, WINDOW, BLOCK_N
    )
    place, total = tl.zeros([ROWS], tl.int32), 0
    for begin in tl.range(0, num_rows, ROWS_AT_ONCE, num_stages=1):
        other = begin + tl.arange(0, ROWS_AT_ONCE)
        others, their_tokens = _programs(
            other, num_rows, streams, kv_lens, share_bits, whole_span, least_span, WINDOW, BLOCK_N
        )
        is_equal = their_tokens[None, :] == tokens[:, None]
        is_before = (their_tokens[None, :] > tokens[:, None]) | (is_equal & (other[None, :] < row[:, None]))
        place += tl.sum(tl.where(is_before, others[None, :], 0), 1)
        total += tl.sum(others)
    # fmt: on
    share = tl.arange(0, SHARES)[None, :]
    mine = (row[:, None] << share_bits) + share
    tl.store(order + place[:, None] + share, mine, mask=share < count[:, None])
    # Each fills up the places of as many entries as its rows could have.
    tl.store(
        order + mine, tl.full([ROWS, SHARES], NO_PROGRAM, tl.int32), mask=(row < num_rows)[:, None] & (mine >= total)
    )
