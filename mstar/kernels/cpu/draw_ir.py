"""LLVM IR of the sampler's draw: what `sampling.py` does to a row, one row at a time in a core's cache.

Cuts are found by bisection on the bit pattern of minus the score, since non-negative floats order like their bits.
Masses are the reference's whole numbers, so that a nucleus is the same whatever the order of summation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mstar.kernels.cpu.ir import IrFunction
from mstar.kernels.cpu.jit import ir
from mstar.kernels.cpu.race_ir import CANDIDATES, candidates, race
from mstar.kernels.sampling import EXP_TERMS, LN2_HIGH, LN2_LOW, LOG2_E, MASS_BITS, MIN_SCORE

# What `worker` takes, 8 bytes each: `rows` a ROW array; `scratch` of `stride` bytes per thread.
ARGUMENTS = ("rows", "num_rows", "vocab", "scratch", "stride")
# One row to draw.  `logits` is an address; `top_k` >= vocab and `top_p` 1 are off; `floor` is the score from which
# min-p keeps; tokens below the score `reach` can't be in the nucleus.  The kernel writes the last two.
ROW = np.dtype(
    [
        *((name, np.int64) for name in ("logits", "seed", "offset", "top_k", "top_p_first", "min_keep")),
        *((name, np.float64) for name in ("peak", "temperature", "floor", "top_p", "reach")),
        ("num_candidates", np.int64),
        ("candidates", np.int64, CANDIDATES),
    ]
)


def scratch_bytes(vocab: int, lanes: int) -> int:
    """Bytes of scratch that a thread needs: scores, then scores and masses of the nucleus' candidates."""
    return 16 * (_padded(vocab, lanes) + lanes)


def _padded(vocab: int, lanes: int) -> int:
    return -(-vocab // lanes) * lanes


def module_ir(lanes: int) -> str:
    """The module: `worker(arguments)` and its functions, for vectors of ``lanes`` fp32."""
    module = ir.Module()
    by_count, by_mass = (_define_cut(module, lanes, has_mass) for has_mass in (False, True))
    row = _define_row(module, lanes, by_count, by_mass)
    _define_worker(module, lanes, row)
    return str(module)


def _define_worker(module: Any, lanes: int, row: Any) -> None:
    """Every thread takes each ``threads``-th row."""
    f, a = IrFunction.worker(module, lanes, ARGUMENTS, frozenset({"rows", "scratch"}))
    thread, threads = f.thread()
    scratch = f.at(a["scratch"], f.b.mul(a["stride"], thread), f.i8)
    with f.loop(thread, a["num_rows"], threads) as (index, _):
        address = f.at(a["rows"], f.b.mul(index, f.long(ROW.itemsize)), f.i8)
        f.b.call(row, [address, a["vocab"], scratch])
    f.b.ret_void()


def _define_cut(module: Any, lanes: int, has_mass: bool) -> Any:
    """`(scores, n, lowest, least[, masses, target]) -> score`: a cut, at least ``lowest``, that keeps of the tokens
    from ``lowest`` on just those with fewer than ``least`` tokens above them, or with a mass above them of less than
    ``target``.

    ``n`` scores are read, and up to a vector more that must be -inf.
    """
    pointer, i64 = ir.PointerType(), ir.IntType(64)
    arguments = [pointer, i64, ir.FloatType(), i64, *([pointer, ir.DoubleType()] if has_mass else [])]
    f = IrFunction(module, lanes, "cut_by_mass" if has_mass else "cut_by_count", arguments, ir.FloatType())
    b, (scores, n, lowest, least), masses = f.b, f.args[:4], f.args[4:]
    one = ir.Constant(f.i32, 1)
    end = b.add(b.and_(b.bitcast(lowest, f.i32), ir.Constant(f.i32, 0x7FFFFFFF)), one)
    start = b.block
    search, body, done = (b.append_basic_block() for _ in range(3))
    b.branch(search)
    # Tokens with a key below `low` are kept, one with key `high` is not; of both, how many have a smaller key.
    b.position_at_end(search)
    low, high = b.phi(f.i32), b.phi(f.i32)
    below_low, below_high = b.phi(f.i64), b.phi(f.i64)
    is_wide = b.icmp_signed(">", b.sub(high, low), one)
    has_several = b.icmp_signed(">", b.sub(below_high, below_low), f.long(1))  # a single one is kept, as low is
    b.cbranch(b.and_(is_wide, has_several), body, done)
    b.position_at_end(body)
    middle = b.add(low, b.lshr(b.sub(high, low), one))
    cut = f.splat(b.fneg(b.bitcast(middle, f.f32)))
    zeros = [f.fill(0, f.ints), f.fill(0, f.longs)][: 1 + has_mass]
    with f.loop(0, n, lanes, zeros) as (i, sums):
        is_above = b.fcmp_ordered(">", f.vector(scores, i), cut)
        sums[0] = b.sub(sums[0], b.sext(is_above, f.ints))
        if has_mass:
            mass = f.vector(masses[0], i, f.longs)
            sums[1] = b.add(sums[1], b.select(is_above, mass, f.fill(0, f.longs)))
    count = b.zext(f.total(sums[0]), f.i64)
    is_kept = b.icmp_signed("<", count, least)
    if has_mass:
        is_kept = b.or_(is_kept, b.fcmp_ordered("<", b.sitofp(f.total(sums[1]), f.f64), masses[1]))
    for phi, first, kept, cut_off in (
        (low, ir.Constant(f.i32, 0), middle, low),
        (high, end, high, middle),
        (below_low, f.long(0), count, below_low),
        (below_high, n, below_high, count),
    ):
        phi.add_incoming(first, start)
        phi.add_incoming(b.select(is_kept, kept, cut_off), b.block)
    b.branch(search)
    b.position_at_end(done)
    b.ret(b.fneg(b.bitcast(b.sub(high, one), f.f32)))
    return f.function


def _define_row(module: Any, lanes: int, by_count: Any, by_mass: Any) -> Any:
    """`(row, vocab, scratch)`: scores, floor and candidates of one row."""
    f = IrFunction(module, lanes, "draw", [ir.PointerType(), ir.IntType(64), ir.PointerType()])
    b, (row, vocab, scores) = f.b, f.args
    slot = {name: f.long(offset // 8) for name, (_, offset) in ROW.fields.items()}  # type: ignore[union-attr, misc]
    a = f.fields(row, {name: f.f64 if ROW[name] == np.float64 else f.i64 for name in slot})
    for name in ("peak", "temperature", "floor", "reach"):
        a[name] = b.fptrunc(a[name], f.f32)
    padded = b.and_(b.add(vocab, f.long(lanes - 1)), f.long(-lanes))
    _scores(f, b.inttoptr(a["logits"], ir.PointerType()), a, vocab, padded, scores)

    before = b.block
    with b.if_then(b.icmp_signed("<", a["top_k"], vocab)):
        in_k = b.call(by_count, [scores, padded, a["floor"], a["top_k"]])
        after = b.block
    floor = f.merge((a["floor"], before), (in_k, after))

    before = b.block
    with b.if_then(b.fcmp_ordered("<", a["top_p"], ir.Constant(f.f64, 1.0))):
        base = b.select(b.icmp_signed("!=", a["top_p_first"], f.long(0)), a["floor"], floor)
        near = f.at(scores, padded)
        masses = f.at(near, b.add(padded, f.long(lanes)))
        lowest = f.larger(base, a["reach"])
        count, total = _masses(f, scores, padded, base, lowest, near, masses)
        target = b.fmul(b.sitofp(total, f.f64), a["top_p"])
        cut = b.call(by_mass, [near, count, lowest, a["min_keep"], masses, target])
        in_p = f.larger(floor, cut)
        after = b.block
    floor = f.merge((floor, before), (in_p, after))

    best = race(f, a, padded, scores, floor)
    candidates(f, row, slot, padded, scores, best)
    b.ret_void()
    return f.function


def _scores(f: IrFunction, logits: Any, a: dict[str, Any], vocab: Any, padded: Any, scores: Any) -> None:
    """(logits - peak) / temperature, and -inf up to a whole vector."""
    b = f.b
    peak, temperature, end = f.splat(a["peak"]), f.splat(a["temperature"]), f.splat(vocab)
    with f.loop(0, padded, f.lanes) as (i, _):
        is_token = b.icmp_signed("<", b.add(f.splat(i), f.count_up()), end)
        x = f.call(
            f"llvm.masked.load.v{f.lanes}f32.p0",
            f.floats,
            f.at(logits, i),
            ir.Constant(f.i32, 4),
            is_token,
            f.fill(-np.inf),
        )
        f.store(b.fdiv(b.fsub(x, peak), temperature), scores, i)


def _masses(f: IrFunction, scores: Any, padded: Any, base: Any, lowest: Any, near: Any, masses: Any) -> tuple[Any, Any]:
    """The mass from ``base`` on; scores from ``lowest`` >= ``base`` on go to ``near``, their masses to ``masses``.

    Returns how many those are, and the mass.
    """
    b = f.b
    start, low = f.splat(base), f.splat(lowest)
    with f.loop(0, padded, f.lanes, (f.long(0), f.fill(0, f.longs))) as (i, carried):
        count, total = carried
        score = f.vector(scores, i)
        mass = _mass(f, score)
        carried[1] = b.add(total, b.select(b.fcmp_ordered(">=", score, start), mass, f.fill(0, f.longs)))
        is_near = b.fcmp_ordered(">=", score, low)
        for kind, value, to in (("f32", score, near), ("i64", mass, masses)):
            address = f.at(to, count, value.type.element)
            f.call(f"llvm.masked.compressstore.v{f.lanes}{kind}", f.void, value, address, is_near)
        bits = b.bitcast(is_near, ir.IntType(f.lanes))
        carried[0] = b.add(count, b.zext(f.call(f"llvm.ctpop.i{f.lanes}", bits.type, bits), f.i64))
    count, total = carried
    f.store(f.fill(-np.inf), near, count)
    return count, f.total(total)


def _mass(f: IrFunction, score: Any) -> Any:
    """`sampling.fixed_mass`, operation by operation: nothing may be fused."""
    b = f.b

    def times(x: Any, constant: float) -> Any:
        return b.fmul(x, f.fill(constant, f.doubles))

    s = b.fpext(f.larger(score, f.fill(MIN_SCORE)), f.doubles)
    n = f.call(f"llvm.floor.v{f.lanes}f64", f.doubles, b.fadd(times(s, LOG2_E), f.fill(0.5, f.doubles)))
    r = b.fsub(b.fsub(s, times(n, LN2_HIGH)), times(n, LN2_LOW))
    y = f.fill(EXP_TERMS[0], f.doubles)
    for term in EXP_TERMS[1:]:
        y = b.fadd(b.fmul(y, r), f.fill(term, f.doubles))
    exponent = b.add(b.sext(b.fptosi(n, f.ints), f.longs), f.fill(1023 + MASS_BITS, f.longs))
    mass = b.fmul(y, b.bitcast(b.shl(exponent, f.fill(52, f.longs)), f.doubles))
    # Added to 2**52, a smaller number is rounded to a whole one, which is then the low bits.
    bits = b.bitcast(b.fadd(mass, f.fill(2.0**52, f.doubles)), f.longs)
    return b.sub(bits, f.fill((1023 + 52) << 52, f.longs))
