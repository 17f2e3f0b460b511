"""A function of LLVM IR over vectors, as it is being written: shorthands over llvmlite's builder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from mstar.kernels.cpu_jit import ir


class IrFunction:
    """A function being written: its builder ``b``, its arguments, and the shorthands the others share."""

    def __init__(self, module: Any, lanes: int, name: str, result: Any, arguments: Sequence[Any]) -> None:
        self.module, self.lanes = module, lanes
        self.i32, self.i64, self.f32, self.f64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
        self.ints, self.longs, self.floats = (ir.VectorType(t, lanes) for t in (self.i32, self.i64, self.f32))
        self.function = ir.Function(module, ir.FunctionType(result, arguments), name)
        self.args = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block())

    def long(self, value: int) -> Any:
        return ir.Constant(self.i64, value)

    def fill(self, kind: Any, value: float) -> Any:
        """A constant vector of ``kind``."""
        return ir.Constant(kind, [value] * self.lanes)

    def constant(self, value: float) -> Any:
        return ir.Constant(self.f32, value)

    def any(self, mask: Any) -> Any:
        bits = self.b.bitcast(mask, ir.IntType(self.lanes))
        return self.b.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    def merge(self, *branches: tuple[Any, Any]) -> Any:
        """The value of whichever (value, block) was gone through."""
        phi = self.b.phi(branches[0][0].type)
        for value, block in branches:
            phi.add_incoming(value, block)
        return phi

    def splat(self, value: Any) -> Any:
        kind = ir.VectorType(value.type, self.lanes)
        first = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(self.i32, 0))
        return self.b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), self.fill(self.ints, 0))

    def at(self, base: Any, index: Any, kind: Any) -> Any:
        return self.b.gep(base, [index], source_etype=kind)

    def vector(self, base: Any, index: Any, kind: Any) -> Any:
        """The vector of ``kind`` that starts at element ``index``."""
        return self.b.load(self.at(base, index, kind.element), typ=kind, align=4)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """Calls LLVM's intrinsic or an outer function ``name``, declared by its first use."""
        callee = self.module.globals.get(name)
        if callee is None:
            callee = ir.Function(self.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(callee, arguments)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, x, y, z)

    def larger(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def total(self, vector: Any) -> Any:
        """The sum of an integer vector's lanes."""
        kind = vector.type.element
        return self.call(f"llvm.vector.reduce.add.v{self.lanes}i{kind.width}", kind, vector)

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any, step: Any, carried: Sequence[Any] = ()) -> Iterator[tuple[Any, list[Any]]]:
        """``for index in range(start, stop, step)`` around the body.

        Gives (index, values): the body replaces the carried ``values`` in the list, which afterwards holds the last
        ones.
        """
        b, before = self.b, self.b.block
        head, body, end = (b.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        phis = [b.phi(value.type) for value in (start, *carried)]
        b.cbranch(b.icmp_signed("<", phis[0], stop), body, end)
        b.position_at_end(body)
        values = phis[1:]
        yield phis[0], values
        following = (b.add(phis[0], step), *values)
        for phi, first, later in zip(phis, (start, *carried), following, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, b.block)
        b.branch(head)
        b.position_at_end(end)
        values[:] = phis[1:]
