"""LLVM IR of the row-wise operators.  Every thread takes an equal run of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from mstar.kernels.cpu_jit import ir
from mstar.kernels.ir_vector import VectorCode, i64, loop


def add_rms_norm_ir(dim: int, eps: float, has_delta: bool, lanes: int) -> str:
    """`worker(rows, x, delta, weight, out)`: x [rows, dim] += delta, then out = the norm of x times weight [dim]."""
    code = _RowCode(lanes, ("x", "delta", "weight", "out"))
    b = code.b
    with code.rows() as row:
        offset = b.mul(row, i64(dim))
        x, delta, out = (code.at(code.a[name], offset) for name in ("x", "delta", "out"))
        with loop(b, i64(0), i64(dim), lanes, [code.splat(0.0)]) as column:
            at = code.at(x, column.index)
            value = code.load(at)
            if has_delta:
                value = b.fadd(value, code.load(code.at(delta, column.index)))
                code.store(value, at)
            column.next = [code.fma(value, value, column.values[0])]
        zero = ir.Constant(code.f32, 0.0)
        squares = code.intrinsic("vector.reduce.fadd", code.f32, [zero, column.values[0]], fastmath=("reassoc",))
        mean = code.broadcast(b.fdiv(squares, ir.Constant(code.f32, float(dim))))
        root = code.intrinsic("sqrt", code.vector, [b.fadd(mean, code.splat(eps))])
        inverse = b.fdiv(code.splat(1.0), root)
        with loop(b, i64(0), i64(dim), lanes) as column:
            value = b.fmul(code.load(code.at(x, column.index)), inverse)
            weighted = b.fmul(value, code.load(code.at(code.a["weight"], column.index)))
            code.store(weighted, code.at(out, column.index))
    b.ret_void()
    return str(code.module)


def silu_mul_ir(dim: int, lanes: int) -> str:
    """`worker(rows, gate_up, out)`: out [rows, dim] = silu of the first half of gate_up's rows times the second."""
    code = _RowCode(lanes, ("gate_up", "out"))
    b = code.b
    one, zero = code.splat(1.0), code.splat(0.0)
    with code.rows() as row:
        gate_row = code.at(code.a["gate_up"], b.mul(row, i64(2 * dim)))
        out = code.at(code.a["out"], b.mul(row, i64(dim)))
        with loop(b, i64(0), i64(dim), lanes) as column:
            gate_at = code.at(gate_row, column.index)
            gate = code.load(gate_at)
            is_negative = b.fcmp_ordered("<", gate, zero)
            # exp of minus the magnitude never overflows; it is the numerator for negative gates, else 1 is.
            power = code.exp(b.select(is_negative, gate, b.fsub(zero, gate)))
            silu = b.fdiv(b.fmul(gate, b.select(is_negative, power, one)), b.fadd(one, power))
            code.store(b.fmul(silu, code.load(gate_at, dim)), code.at(out, column.index))
    b.ret_void()
    return str(code.module)


class _RowCode(VectorCode):
    """A `worker` whose arguments are the number of rows, then the addresses ``names``, here in ``a``."""

    def __init__(self, lanes: int, names: Sequence[str]) -> None:
        module, pointer, long = ir.Module(), ir.PointerType(), ir.IntType(64)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), "worker")
        super().__init__(module, function, lanes)
        b = self.b
        self._num_rows = b.load(function.args[0], typ=long)
        self.a = {
            name: b.load(b.gep(function.args[0], [i64(i)], source_etype=long), typ=pointer)
            for i, name in enumerate(names, 1)
        }
        query = ir.FunctionType(ir.IntType(32), [])
        self._thread, self._threads = (
            b.zext(b.call(ir.Function(module, query, name), []), long)
            for name in ("omp_get_thread_num", "omp_get_num_threads")
        )

    @contextlib.contextmanager
    def rows(self) -> Iterator[Any]:
        """The body runs for each row of this thread."""
        b = self.b
        begin = b.mul(self._num_rows, self._thread)
        start, stop = (b.udiv(end, self._threads) for end in (begin, b.add(begin, self._num_rows)))
        with loop(b, start, stop, 1) as row:
            yield row.index
