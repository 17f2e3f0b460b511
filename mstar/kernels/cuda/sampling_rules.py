"""The arithmetic of :mod:`mstar.kernels.sampling` in Triton: scores, masses, noise, and where a row keeps its state.

Launched with ``enable_fp_fusion=False``: a mass has the bits of the reference only if no product is fused into a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels import sampling

# Columns of a row's state, int64 [B, STATE]; floats are kept as their bits.
STATE = tl.constexpr(16)
PHASE, TOKEN, FAULT, BEST, OFFSET, PEAK, FLOOR, NEAR, TOTAL, LOW, HIGH, ESTIMATE = (tl.constexpr(i) for i in range(12))

# What a row still needs.  Nothing; or to be surveyed, bracketed and raced; or its noise, and a check of who won.
DONE, SURVEY, BRACKET, RACE, NOISE, CHECK = (tl.constexpr(i) for i in range(6))

NO_FAULT, NOT_FINITE, NOTHING_LEFT = (
    tl.constexpr(i) for i in (0, int(sampling.NOT_FINITE), int(sampling.NOTHING_LEFT))
)
MAX_NOISE = tl.constexpr(float(sampling.MAX_NOISE))
NO_TOKEN = tl.constexpr(2**31 - 1)

_MIN_SCORE = tl.constexpr(sampling.MIN_SCORE)
_LOG2_E, _LN2_HIGH, _LN2_LOW = (tl.constexpr(x) for x in (sampling.LOG2_E, sampling.LN2_HIGH, sampling.LN2_LOW))
_E10, _E9, _E8, _E7, _E6, _E5, _E4, _E3, _E2, _E1, _E0 = (tl.constexpr(x) for x in sampling.EXP_TERMS)
_ROUNDER = tl.constexpr(1.5 * 2.0**52)  # a double of up to 2**51 plus this has its nearest integer in the low bits
_ROUNDER_BITS = tl.constexpr(0x4338000000000000)
_POWER_BIAS = tl.constexpr(1023 + sampling.MASS_BITS)

# Of a step's rows, wherever they begin: a kernel compiled for one step's serves every other.
SETTINGS = [
    "temperatures", "top_ks", "top_ps", "min_ps", "top_p_firsts", "min_keeps", "seeds", "offsets", "last_tokens",
    "overwritten", "index",
]  # fmt: skip

SURVEY_BINS = tl.constexpr(256)  # what counting takes grows with their number
BIN_WIDTH = tl.constexpr(1 / 16)  # of a score


@triton.jit
def needs_total(top_k, top_p, top_p_first, vocab):
    """Whether a nucleus is of the whole distribution, rather than of what top-k leaves."""
    return (top_p < 1) & ((top_p_first != 0) | (top_k <= 0) | (top_k >= vocab))


@triton.jit
def is_last_of(arrivals, row, programs):
    """Whether all other ``programs`` of ``row`` have come here: what they stored can be read.  Counts from 0 again."""
    tl.debug_barrier()  # every thread's stores come before the count
    is_last = tl.atomic_add(arrivals + row, 1, sem="acq_rel") == programs - 1
    if is_last:
        tl.store(arrivals + row, 0)
    return is_last


@triton.jit
def scaled_scores(x, peak, temperature):
    """`sampling.scaled_scores`; ``temperature`` is at least 1e-30."""
    return tl.div_rn(x - peak, temperature)


@triton.jit
def fixed_mass(scores):
    """`sampling.fixed_mass`, bit for bit."""
    s = tl.maximum(scores, _MIN_SCORE).to(tl.float64)
    n = tl.floor(s * _LOG2_E + 0.5)
    r = s - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    y = r * _E10 + _E9
    y = y * r + _E8
    y = y * r + _E7
    y = y * r + _E6
    y = y * r + _E5
    y = y * r + _E4
    y = y * r + _E3
    y = y * r + _E2
    y = y * r + _E1
    y = y * r + _E0
    exponent = (n + _ROUNDER).to(tl.int64, bitcast=True) + _POWER_BIAS
    power = (exponent << 52).to(tl.float64, bitcast=True)
    return (y * power + _ROUNDER).to(tl.int64, bitcast=True) - _ROUNDER_BITS


@triton.jit
def philox_word(seed, offset, token):
    """`philox.philox_words` of scalars ``seed`` and ``offset`` (int64) and ``token`` (int32 block): uint32."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    c2, c3 = token.to(tl.uint32), (token * 0).to(tl.uint32)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0


@triton.jit
def neg_log_noise_of(word):
    """`sampling.neg_log_noise` of a :func:`philox_word`, to a few ulp; it falls as the word rises."""
    v = (word.to(tl.float32) + 0.5) * 2.0**-32
    v = tl.minimum(v, 1 - 2.0**-24)
    rest = 1.0 - v
    lost = (1.0 - rest) - v  # what rounding took from the rest, exactly: the small v have most of theirs there
    return -tl.log(-(tl.log(rest) + lost / rest))


@triton.jit
def neg_log_noise(seed, offset, token):
    """`sampling.neg_log_noise` to a few ulp."""
    return neg_log_noise_of(philox_word(seed, offset, token))


@triton.jit
def may_reach(word, scores, result):
    """Whether a token of about this score and this noise may come up to ``result``: False only where it surely
    doesn't, and rarely True for one that doesn't.

    The score makes up for noise of at most ``E = exp(score - result)``, and ``v`` in `sampling.neg_log_noise` is at
    most E.
    """
    fraction = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)  # 1 + v, rounded down
    return fraction <= tl.exp2((scores - result) * _LOG2_E) * 1.001 + (1 + 2.0**-22)


@triton.jit
def depth_of(scores):
    """The bits of a score's distance from 0: an int32 that grows as scores of at most 0 fall."""
    return scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def score_at(depth):
    """The score of a :func:`depth_of`."""
    return -depth.to(tl.float32, bitcast=True)


@triton.jit
def bin_of(scores):
    """Which of the survey's bins a score of at most 0 falls in: 0 for the best ones, the last for the whole tail."""
    return tl.minimum(scores * (-1 / BIN_WIDTH), SURVEY_BINS - 1).to(tl.int32)


@triton.jit
def bits_of(value):
    """A float32 scalar as an entry of a row's state."""
    return value.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def float_of(entry):
    """The inverse of :func:`bits_of`."""
    return entry.to(tl.int32).to(tl.float32, bitcast=True)
