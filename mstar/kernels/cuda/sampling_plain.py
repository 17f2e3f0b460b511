"""The race of rows in which the noise of every token counts.

A token arrives after the time ``E * exp(-score)``, with ``E`` its exponential noise, and the first one wins.  A pass
over the logits bounds the time of each chunk's first from below; then the few chunks that may have the winner are drawn
from exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.sampling_rules import NO_TOKEN, neg_log_noise, philox_word, scaled_scores

_LOG2_E = tl.constexpr(1.4426950408889634)
_SLACK = tl.constexpr(1e-3)  # more than rounding moves a bound by, where scores are such that noise makes up for them


@triton.jit
def is_plain(temperature, top_k, top_p, min_p, vocab, APPLY_FILTERS: tl.constexpr):
    """Whether a row with these settings keeps every token."""
    plain = (temperature != 0) & (min_p == 0)
    if APPLY_FILTERS:
        plain = plain & (top_k != 1) & ((top_k <= 0) | (top_k >= vocab)) & ~(top_p < 1)
    return plain


@triton.jit
def earliest(x, top, temperature, seed, offset, token):
    """A time before which no token of a chunk arrives, counted as if ``top`` had a score of 0: fp32 [chunks].

    ``x`` fp32 [chunks, tokens] with the maxima ``top``.  Noise is at least ``v`` of `sampling.neg_log_noise`.
    """
    word = philox_word(seed, offset, token)
    least_v = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1
    rate = _LOG2_E / tl.maximum(temperature, 1e-30)
    return tl.min(least_v * tl.exp2((top[:, None] - x) * rate), 1)


@triton.jit
def hopes(top, time, peak, temperature):
    """What the result of a chunk's winner is at most: fp32 [chunks], from their maxima and :func:`earliest`."""
    hope = scaled_scores(top, peak, temperature) - tl.log(time) + _SLACK
    return tl.where(top > float("-inf"), hope, float("-inf"))


@triton.jit
def first_above(
    x_row, vocab, hope, peak, temperature, best, worst, seed, offset, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """The winner of the race between the tokens whose score lies above ``worst``, and its score, by looking into the
    most promising chunks until no other may have a better one.

    ``hope`` fp32 [CHUNKS] as :func:`hopes` gives it; ``best`` is the token of the maximum ``peak``, and takes part.
    """
    chunk, inner = tl.arange(0, CHUNKS), tl.arange(0, CHUNK)
    most, winner, winner_score = neg_log_noise(seed, offset, best), best, peak * 0
    most_hope = tl.max(hope)
    while most_hope >= most:
        first = tl.min(tl.where(hope == most_hope, chunk, CHUNKS))
        token = first * CHUNK + inner
        x = tl.load(x_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        score = scaled_scores(x, peak, temperature)
        own = tl.where(score > worst, score + neg_log_noise(seed, offset, token), float("-inf"))
        result = tl.max(own)
        own_winner = tl.min(tl.where(own == result, token, NO_TOKEN))
        is_better = (result > most) | ((result == most) & (own_winner < winner))
        if is_better:
            most, winner = result, own_winner
            winner_score = tl.max(tl.where(token == own_winner, score, float("-inf")))
        hope = tl.where(chunk == first, float("-inf"), hope)
        most_hope = tl.max(hope)
    return winner, winner_score
