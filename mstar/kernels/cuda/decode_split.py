"""How many programs of decode attention share a row's tokens, and which of them each one has.

How many may share is fixed by the shape; how many do, and over which tokens, by the lengths on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

PROGRAMS = 1056  # that shares make up to where rows are few: eight for each multiprocessor of an H200
ROW_SHARES = 4  # of a long row where rows are many
MAX_SHARES = 64


@dataclass(frozen=True)
class DecodeSplit:
    """How programs go through the rows.

    Attributes:
        block_m: rows of the matrix instructions, of which the query heads of a kv head fill a few: 16, or 64 with four
            warps or eight, which then multiply from shared memory.
        block_n: tokens of one step; a multiple of the page size or a divisor.
        num_stages: one more than the steps whose keys and values are on their way at once; from 2 on, since with 1
            values are fetched when keys have come.
        shares: programs that a row and kv head may be shared by, a power of 2 up to ``MAX_SHARES``.
        whole_span: tokens up to which a row is one program's, since adding up shares costs as much as reading these.
        least_span: tokens of the smallest share of a longer row.
        fetches_ahead: of rows that are read ahead, the first keys and values come to the L2 cache meanwhile.
        longest_first: programs begin in order of their tokens, where the caller has room for that order.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    shares: int
    whole_span: int
    least_span: int
    fetches_ahead: bool = False
    longest_first: bool = False


def choose_split(num_rows: int, kv_heads: int, head_dim: int) -> DecodeSplit:
    """By the programs that there are anyhow, one for each row and kv head.

    While every program has a multiprocessor of its own, what counts is the way from the length to the result.  When
    there are more, what counts is bytes on their way: small programs, of which a multiprocessor holds many in different
    phases, and no long row that ends alone.  Measured on an H200 at 256 and 1,024 tokens a row, and at rows of 100 to
    2,048 mixed as a run leaves them.
    """
    num_pairs = num_rows * kv_heads
    is_narrow = head_dim <= 64
    if num_pairs <= (48 if is_narrow else 132):
        return DecodeSplit(64, 64, 4, 3, shares_of(PROGRAMS // 4, num_pairs), 256, 128)
    if num_pairs <= 132:
        return DecodeSplit(16, 32, 1, 3, shares_of(PROGRAMS, num_pairs), 256, 128, fetches_ahead=True)
    if is_narrow or num_pairs <= 264:
        return DecodeSplit(16, 32, 1, 3, ROW_SHARES, 512, 256, fetches_ahead=True)
    return DecodeSplit(16, 32, 1, 3, ROW_SHARES, 1024, 512, fetches_ahead=True, longest_first=True)


def shares_of(num_programs: int, num_pairs: int) -> int:
    """Programs for each of ``num_pairs``, of ``num_programs`` in all: a power of 2."""
    return 1 << (min(max(num_programs // num_pairs, 1), MAX_SHARES).bit_length() - 1)


@triton.jit
def first_token(kv_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The token at whose block a row's reading begins."""
    if WINDOW:
        return tl.maximum(kv_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    return kv_len * 0


@triton.jit
def span_of_share(num_tokens, share_bits, whole_span, least_span, BLOCK_N: tl.constexpr):
    """Tokens of each share but the last, of which a row of ``num_tokens`` has up to ``1 << share_bits``: all of them up
    to ``whole_span``, else equal shares of at least ``least_span``; whole blocks."""
    least = tl.where(num_tokens <= whole_span, whole_span, least_span)
    span = tl.maximum((num_tokens + (1 << share_bits) - 1) >> share_bits, least)
    return tl.cdiv(span, BLOCK_N) * BLOCK_N
