"""LLVM IR of the sampler's draw: what `sampling.py` does to a row, one row at a time in a core's cache.

Cuts are found by bisection on the bit pattern of minus the score, since non-negative floats order like their bits.
Masses are the reference's whole numbers, so that a nucleus is the same whatever the order of summation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mstar.kernels.cpu_jit import ir
from mstar.kernels.ir_function import IrFunction
from mstar.kernels.race_ir import CANDIDATES, candidates, race
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
    f = IrFunction(module, lanes, "worker", ir.VoidType(), [ir.PointerType()])
    a = {
        name: f.b.load(
            f.at(f.args[0], f.long(i), f.i64), typ=ir.PointerType() if name in ("rows", "scratch") else f.i64
        )
        for i, name in enumerate(ARGUMENTS)
    }
    thread, threads = (f.b.zext(f.call(f"omp_get_{name}", f.i32), f.i64) for name in ("thread_num", "num_threads"))
    scratch = f.at(a["scratch"], f.b.mul(a["stride"], thread), ir.IntType(8))
    with f.loop(thread, a["num_rows"], threads) as (index, _):
        address = f.at(a["rows"], f.b.mul(index, f.long(ROW.itemsize)), ir.IntType(8))
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
    f = IrFunction(module, lanes, "cut_by_mass" if has_mass else "cut_by_count", ir.FloatType(), arguments)
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
    zeros = [f.fill(f.ints, 0), f.fill(f.longs, 0)][: 1 + has_mass]
    with f.loop(f.long(0), n, f.long(lanes), zeros) as (i, sums):
        is_above = b.fcmp_ordered(">", f.vector(scores, i, f.floats), cut)
        sums[0] = b.sub(sums[0], b.sext(is_above, f.ints))
        if has_mass:
            mass = f.vector(masses[0], i, f.longs)
            sums[1] = b.add(sums[1], b.select(is_above, mass, f.fill(f.longs, 0)))
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
    f = IrFunction(module, lanes, "draw", ir.VoidType(), [ir.PointerType(), ir.IntType(64), ir.PointerType()])
    b, (row, vocab, scores) = f.b, f.args
    slot = {name: f.long(offset // 8) for name, (_, offset) in ROW.fields.items()}  # type: ignore[union-attr, misc]
    a = {}
    for name, index in slot.items():
        kind = f.f64 if ROW[name] == np.float64 else f.i64
        a[name] = b.load(f.at(row, index, kind), typ=kind)
    for name in ("peak", "temperature", "floor", "reach"):
        a[name] = b.fptrunc(a[name], f.f32)
    step = f.long(lanes)
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
        near = f.at(scores, padded, f.f32)
        masses = f.at(near, b.add(padded, step), f.f32)
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
    lane = ir.Constant(f.longs, list(range(f.lanes)))
    peak, temperature, end = f.splat(a["peak"]), f.splat(a["temperature"]), f.splat(vocab)
    with f.loop(f.long(0), padded, f.long(f.lanes)) as (i, _):
        is_token = b.icmp_signed("<", b.add(f.splat(i), lane), end)
        x = f.call(
            f"llvm.masked.load.v{f.lanes}f32.p0",
            f.floats,
            f.at(logits, i, f.f32),
            ir.Constant(f.i32, 4),
            is_token,
            f.fill(f.floats, -np.inf),
        )
        b.store(b.fdiv(b.fsub(x, peak), temperature), f.at(scores, i, f.f32), align=4)


def _masses(f: IrFunction, scores: Any, padded: Any, base: Any, lowest: Any, near: Any, masses: Any) -> tuple[Any, Any]:
    """The mass from ``base`` on; scores from ``lowest`` >= ``base`` on go to ``near``, their masses to ``masses``.

    Returns how many those are, and the mass.
    """
    b = f.b
    start, low = f.splat(base), f.splat(lowest)
    with f.loop(f.long(0), padded, f.long(f.lanes), (f.long(0), f.fill(f.longs, 0))) as (i, carried):
        count, total = carried
        score = f.vector(scores, i, f.floats)
        mass = _mass(f, score)
        carried[1] = b.add(total, b.select(b.fcmp_ordered(">=", score, start), mass, f.fill(f.longs, 0)))
        is_near = b.fcmp_ordered(">=", score, low)
        for kind, value, to in (("f32", score, near), ("i64", mass, masses)):
            address = f.at(to, count, value.type.element)
            f.call(f"llvm.masked.compressstore.v{f.lanes}{kind}", ir.VoidType(), value, address, is_near)
        bits = b.bitcast(is_near, ir.IntType(f.lanes))
        carried[0] = b.add(count, b.zext(f.call(f"llvm.ctpop.i{f.lanes}", bits.type, bits), f.i64))
    count, total = carried
    b.store(f.fill(f.floats, -np.inf), f.at(near, count, f.f32), align=4)
    return count, f.total(total)


def _mass(f: IrFunction, score: Any) -> Any:
    """`sampling.fixed_mass`, operation by operation: nothing may be fused."""
    b, doubles = f.b, ir.VectorType(f.f64, f.lanes)

    def times(x: Any, constant: float) -> Any:
        return b.fmul(x, f.fill(doubles, constant))

    s = b.fpext(f.larger(score, f.fill(f.floats, MIN_SCORE)), doubles)
    n = f.call(f"llvm.floor.v{f.lanes}f64", doubles, b.fadd(times(s, LOG2_E), f.fill(doubles, 0.5)))
    r = b.fsub(b.fsub(s, times(n, LN2_HIGH)), times(n, LN2_LOW))
    y = f.fill(doubles, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        y = b.fadd(b.fmul(y, r), f.fill(doubles, term))
    exponent = b.add(b.sext(b.fptosi(n, f.ints), f.longs), f.fill(f.longs, 1023 + MASS_BITS))
    mass = b.fmul(y, b.bitcast(b.shl(exponent, f.fill(f.longs, 52)), doubles))
    # Added to 2**52, a smaller number is rounded to a whole one, which is then the low bits.
    bits = b.bitcast(b.fadd(mass, f.fill(doubles, 2.0**52)), f.longs)
    return b.sub(bits, f.fill(f.longs, (1023 + 52) << 52))
