"""LLVM IR of the race: noise for the tokens that can win, with logarithms good enough to name the few that may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mstar.kernels.cpu.ir import IrFunction
from mstar.kernels.cpu.ir_math import log
from mstar.kernels.sampling import MAX_NOISE, MIN_NOISE

CANDIDATES = 8  # noted per row
# Twice what a result may be off: E by 2e-6 of itself, either logarithm by 1e-6, and the sum by the rounding of both.
MARGIN = 2e-5
_ROUNDS = 10


def race(f: IrFunction, a: dict[str, Any], padded: Any, scores: Any, floor: Any) -> Any:
    """Adds noise to the scores that are kept and can win, and makes the others -inf; returns the best result."""
    b = f.b
    keys = philox_keys(f, a["seed"])
    counter = [f.splat(word) for word in (a["offset"], b.lshr(a["offset"], f.long(32)))]
    nothing = f.fill(-np.inf)
    # The token with score 0 makes at least the least noise.
    with f.loop(0, padded, f.lanes, [f.constant(MIN_NOISE)]) as (i, best):
        can_win = f.larger(floor, b.fsub(best[0], f.constant(float(MAX_NOISE))))
        score = f.vector(scores, i)
        runs = b.fcmp_ordered(">=", score, f.splat(can_win))
        f.store(nothing, scores, i)
        before = b.block
        with b.if_then(f.any(runs)):
            v = uniform(f, philox(f, keys, [*counter, b.add(f.splat(i), f.count_up()), f.fill(0, f.longs)]))
            bound = b.fadd(score, most_noise(f, v))
            is_close = b.and_(runs, b.fcmp_ordered(">=", bound, f.splat(b.fsub(best[0], f.constant(MARGIN)))))
            without = b.block
            with b.if_then(f.any(is_close)):
                result = b.select(is_close, b.fadd(score, neg_log_noise(f, v)), nothing)
                f.store(result, scores, i)
                better = f.larger(best[0], f.peak(result))
                within = b.block
            inner = f.merge((best[0], without), (better, within))
            after = b.block
        best[0] = f.merge((best[0], before), (inner, after))
    return best[0]


def uniform(f: IrFunction, word: Any) -> Any:
    """The ``v`` of `sampling.neg_log_noise`."""
    b, largest = f.b, f.fill(1 - 2.0**-24)
    v = b.fmul(b.fadd(b.uitofp(word, f.floats), f.fill(0.5)), f.fill(2.0**-32))
    return b.select(b.fcmp_ordered("<", v, largest), v, largest)


def most_noise(f: IrFunction, v: Any) -> Any:
    """Some number above -log E: E is at least ``v``, whose bits, read as a number, are below its logarithm."""
    bits = f.b.sitofp(f.b.bitcast(v, f.ints), f.floats)
    return f.fma(bits, f.fill(-np.log(2) * 2.0**-23), f.fill(np.log(2) * 127 + 1e-4))


def philox_keys(f: IrFunction, seed: Any) -> list[tuple[Any, Any]]:
    """Philox' two keys of every round; only the low 32 bits of a lane count."""
    key = [seed, f.b.lshr(seed, f.long(32))]
    keys = []
    for _ in range(_ROUNDS):
        keys.append((f.splat(key[0]), f.splat(key[1])))
        key = [f.b.add(key[0], f.long(0x9E3779B9)), f.b.add(key[1], f.long(0xBB67AE85))]
    return keys


def philox(f: IrFunction, keys: Sequence[tuple[Any, Any]], counter: Sequence[Any]) -> Any:
    """`philox.philox_words`, a counter's words in the low halves of 64-bit lanes: products need no shuffles."""
    b = f.b
    c0, c1, c2, c3 = counter

    def product(word: Any, factor: int) -> Any:
        return b.mul(b.and_(word, f.fill(0xFFFFFFFF, f.longs)), f.fill(factor, f.longs))

    def high(word: Any) -> Any:
        return b.lshr(word, f.fill(32, f.longs))

    for k0, k1 in keys:
        p0, p1 = product(c0, 0xD2511F53), product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = b.xor(b.xor(high(p1), c1), k0), p1, b.xor(b.xor(high(p0), c3), k1), p0
    return b.trunc(c0, f.ints)


def neg_log_noise(f: IrFunction, v: Any) -> Any:
    """`sampling.neg_log_noise` but for less than MARGIN / 2."""
    b = f.b

    # 1 - v rounds to 2**-25, too coarse beside a small v: the series of -log(1 - v) serves there.
    series = f.fill(0.25)
    for term in (1 / 3, 1 / 2, 1.0):
        series = f.fma(series, v, f.fill(term))
    noise = b.select(
        b.fcmp_ordered("<", v, f.fill(2.0**-6)),
        b.fmul(series, v),
        b.fneg(log(f, b.fsub(f.fill(1.0), v))),
    )
    return b.fneg(log(f, noise))


def candidates(f: IrFunction, row: Any, slot: dict[str, Any], padded: Any, scores: Any, best: Any) -> None:
    """Counts the tokens within MARGIN of the best result and notes the first few, in order."""
    b = f.b
    bar = b.fsub(best, f.constant(MARGIN))
    bars = f.splat(bar)
    with f.loop(0, padded, f.lanes, [f.long(0)]) as (i, found):
        before, known = b.block, found[0]
        near = b.fcmp_ordered(">=", f.vector(scores, i), bars)
        with b.if_then(f.any(near), likely=False):
            with f.loop(i, b.add(i, f.long(f.lanes)), carried=[known]) as (token, count):
                is_near = b.fcmp_ordered(">=", f.load(scores, token), bar)
                last = f.long(CANDIDATES - 1)
                place = f.smaller(count[0], last)
                with b.if_then(is_near):
                    f.store(token, row, b.add(slot["candidates"], place))
                count[0] = b.add(count[0], b.zext(is_near, f.i64))
            after = b.block
        found[0] = f.merge((known, before), (count[0], after))
    f.store(found[0], row, slot["num_candidates"])
