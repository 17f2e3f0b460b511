"""The draw of a row from a large nucleus, without looking for its end.

The winner of a race is that of any part of the field that it belongs to.  So candidates are drawn: the winner of the
whole row, then that of the tokens above it, and so on.  The nucleus has all tokens above some score, therefore the
first candidate that belongs to it is the winner among its tokens; and a token belongs to it if the mass above it is
less than the nucleus has.  Sums in float32 tell that but for candidates just at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.sampling_plain import earliest, first_above, hopes
from mstar.kernels.cuda.sampling_rules import ESTIMATE, NEAR, float_of, scaled_scores

CANDIDATES = tl.constexpr(8)
LEAST_TOP_P = tl.constexpr(0.76)  # below, so many may all miss
_LOG_RARE = tl.constexpr(-11.5)  # the log of how often all candidates may miss: the exact cut is slow
SUM_SLACK = tl.constexpr(1e-5)  # relative; more than a sum in float32 is off by


@triton.jit
def time_chunks(
    x_row, vocab, num_chunks, maxima, times, temperature, seed, offset,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program's part of ``times`` fp32 [CHUNKS], the row's :func:`sampling_plain.earliest`; ``maxima`` alike."""
    lane = tl.arange(0, TILE // CHUNK)
    for tile in range(tl.program_id(1), tl.cdiv(vocab, TILE), tl.num_programs(1)):
        chunk = tile * (TILE // CHUNK) + lane
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = tl.load(x_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        top = tl.load(maxima + chunk, mask=chunk < num_chunks, other=float("-inf"))
        tl.store(times + chunk, earliest(x, top, temperature, seed, offset, token), mask=chunk < num_chunks)


@triton.jit
def draw_candidates(
    x_row, vocab, num_chunks, maxima, times, peak, temperature, top_p, best, seed, offset, state, scores, tokens,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Lists the row's candidates: ``scores`` fp32 and ``tokens`` int32 [up to CANDIDATES], their number at ``NEAR``."""
    chunk = tl.arange(0, CHUNKS)
    top = tl.load(maxima + chunk, mask=chunk < num_chunks, other=float("-inf"))
    time = tl.load(times + chunk, mask=chunk < num_chunks, other=float("inf"), cache_modifier=".cg")
    hope, top_score = hopes(top, time, peak, temperature), scaled_scores(top, peak, temperature)
    wanted = tl.minimum((1 / tl.log(1 - top_p) * _LOG_RARE).to(tl.int32) + 1, CANDIDATES)
    found, worst = best * 0, peak * 0 + float("-inf")
    while (found < wanted) & (worst < 0):
        left = tl.where(top_score > worst, hope, float("-inf"))
        token, worst = first_above(x_row, vocab, left, peak, temperature, best, worst, seed, offset, CHUNK, CHUNKS)
        tl.store(tokens + found, token)
        tl.store(scores + found, worst)
        found += 1
    tl.store(state + NEAR, found.to(tl.int64))


@triton.jit
def sum_above(x_row, vocab, peak, temperature, state, scores, sums, TILE: tl.constexpr):
    """A program's part of the mass above each candidate: ``sums`` fp32 [CANDIDATES]."""
    lane = tl.arange(0, CANDIDATES)
    limit = tl.load(scores + lane, mask=lane < tl.load(state + NEAR), other=0.0)
    total = tl.zeros((CANDIDATES, TILE), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(vocab, TILE), tl.num_programs(1)):
        token = tile * TILE + tl.arange(0, TILE)
        x = tl.load(x_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        score = scaled_scores(x, peak, temperature)
        total += tl.where(score[None, :] > limit[:, None], tl.exp(score)[None, :], 0.0)
    tl.store(sums + lane, tl.sum(total, 1))


@triton.jit
def choose_candidate(programs, top_p, state, tokens, sums, PROGRAMS: tl.constexpr):
    """The row's token by ``sums`` fp32 [programs, CANDIDATES], and whether that is sure."""
    lane, share = tl.arange(0, CANDIDATES), tl.arange(0, PROGRAMS)
    at = sums + share[:, None] * CANDIDATES + lane[None, :]
    is_one = (share < programs)[:, None] & (lane >= 0)[None, :]
    above = tl.sum(tl.load(at, mask=is_one, other=0.0, cache_modifier=".cg"), 0)
    target = float_of(tl.load(state + ESTIMATE)) * top_p
    is_candidate = lane < tl.load(state + NEAR)
    is_out = is_candidate & (above >= target * (1 + 2 * SUM_SLACK))
    is_in = is_candidate & (above < target * (1 - 2 * SUM_SLACK))
    first = tl.sum(is_out.to(tl.int32))  # less and less lies above later ones
    is_sure = tl.sum((is_in & (lane == first)).to(tl.int32)) > 0
    token = tl.load(tokens + tl.where(is_sure, first, 0))
    return token, is_sure
