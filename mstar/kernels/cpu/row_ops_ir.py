"""LLVM IR of the row-wise operators.  Every thread takes an equal run of rows."""

from __future__ import annotations

from mstar.kernels.cpu.ir import IrFunction
from mstar.kernels.cpu.ir_math import exp
from mstar.kernels.cpu.jit import ir


def add_rms_norm_ir(dim: int, eps: float, has_delta: bool, lanes: int) -> str:
    """`worker(rows, x, delta, weight, out)`: x [rows, dim] += delta, then out = the norm of x times weight [dim]."""
    names = ("x", "delta", "weight", "out")
    f, a = IrFunction.worker(ir.Module(), lanes, ("rows", *names), frozenset(names))
    b = f.b
    with f.loop(*f.share(a["rows"])) as (row, _):
        x, delta, out = (f.at(a[name], b.mul(row, f.long(dim))) for name in ("x", "delta", "out"))
        with f.loop(0, dim, lanes, [f.fill(0.0)]) as (column, squares):
            value = f.vector(x, column)
            if has_delta:
                value = b.fadd(value, f.vector(delta, column))
                f.store(value, x, column)
            squares[0] = f.fma(value, value, squares[0])
        mean = f.splat(b.fdiv(f.total(squares[0]), f.constant(dim)))
        root = f.call(f"llvm.sqrt.v{lanes}f32", f.floats, b.fadd(mean, f.fill(eps)))
        inverse = b.fdiv(f.fill(1.0), root)
        with f.loop(0, dim, lanes) as (column, _):
            value = b.fmul(f.vector(x, column), inverse)
            f.store(b.fmul(value, f.vector(a["weight"], column)), out, column)
    b.ret_void()
    return str(f.module)


def silu_mul_ir(dim: int, lanes: int) -> str:
    """`worker(rows, gate_up, out)`: out [rows, dim] = silu of the first half of gate_up's rows times the second."""
    names = ("gate_up", "out")
    f, a = IrFunction.worker(ir.Module(), lanes, ("rows", *names), frozenset(names))
    b, one, zero = f.b, f.fill(1.0), f.fill(0.0)
    with f.loop(*f.share(a["rows"])) as (row, _):
        gates = f.at(a["gate_up"], b.mul(row, f.long(2 * dim)))
        ups = f.at(gates, dim)
        out = f.at(a["out"], b.mul(row, f.long(dim)))
        with f.loop(0, dim, lanes) as (column, _):
            gate = f.vector(gates, column)
            is_negative = b.fcmp_ordered("<", gate, zero)
            # exp of minus the magnitude never overflows; it is the numerator for negative gates, else 1 is.
            power = exp(f, b.select(is_negative, gate, b.fsub(zero, gate)))
            silu = b.fdiv(b.fmul(gate, b.select(is_negative, power, one)), b.fadd(one, power))
            f.store(b.fmul(silu, f.vector(ups, column)), out, column)
    b.ret_void()
    return str(f.module)


def rotate_ir(dim: int, rotary_dim: int, lanes: int) -> str:
    """`worker(rows, heads, stride, x, cos, sin, out)`: rotates the halves of each head's first ``rotary_dim`` dims.

    x [rows, heads, dim] with rows ``stride`` elements apart; cos, sin [rows, rotary_dim]; out dense.
    """
    arguments = ("rows", "heads", "stride", "x", "cos", "sin", "out")
    f, a = IrFunction.worker(ir.Module(), lanes, arguments, frozenset(arguments[3:]))
    b, half = f.b, rotary_dim // 2
    with f.loop(*f.share(a["rows"])) as (row, _):
        x, out = f.at(a["x"], b.mul(row, a["stride"])), f.at(a["out"], b.mul(row, b.mul(a["heads"], f.long(dim))))
        tables = [f.at(a[name], b.mul(row, f.long(rotary_dim))) for name in ("cos", "sin")]
        with f.loop(0, b.mul(a["heads"], f.long(dim)), dim) as (head, _):
            head_in, head_out = f.at(x, head), f.at(out, head)
            for column in range(0, half, lanes):
                pair = [f.vector(head_in, column), f.vector(head_in, column + half)]
                for own, other, place in ((*pair, column), (*reversed(pair), column + half)):
                    cos, sin = (f.vector(table, place) for table in tables)
                    f.store(f.fma(other, sin, b.fmul(own, cos)), head_out, place)
            for column in range(rotary_dim, dim, lanes):
                f.store(f.vector(head_in, column), head_out, column)
    b.ret_void()
    return str(f.module)
