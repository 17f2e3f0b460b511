"""Writing vector code in LLVM IR: shorthands over llvmlite's builder that all kernels share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mstar.kernels.cpu.jit import ir


class IrFunction:
    """A function being written, over vectors of ``lanes`` elements: its builder ``b``, its arguments ``args``.

    Integers are taken wherever an i64 is: as index, bound or step.
    """

    def __init__(
        self, module: Any, lanes: int, name: str, arguments: Sequence[Any] = (), result: Any | None = None
    ) -> None:
        """``arguments``: types; ``result``: None for void.  All functions but ``worker`` are the module's own."""
        self.module, self.lanes = module, lanes
        self.i8, self.i32, self.i64 = (ir.IntType(bits) for bits in (8, 32, 64))
        self.f16, self.f32, self.f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
        self.void, self.pointer = ir.VoidType(), ir.PointerType()
        self.bytes, self.ints, self.longs = (ir.VectorType(kind, lanes) for kind in (self.i8, self.i32, self.i64))
        self.halves, self.floats, self.doubles = (ir.VectorType(kind, lanes) for kind in (self.f16, self.f32, self.f64))
        self.function = ir.Function(module, ir.FunctionType(result or self.void, arguments), name)
        self.function.attributes.add("nounwind")
        if name != "worker":
            self.function.linkage = "internal"
        self.args = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block())

    @classmethod
    def worker(
        cls, module: Any, lanes: int, arguments: Sequence[str], pointers: frozenset[str]
    ) -> tuple[IrFunction, dict[str, Any]]:
        """A `worker` and its ``arguments`` by name, 8 bytes each, of which those in ``pointers`` are addresses."""
        f = cls(module, lanes, "worker", [ir.PointerType()])
        kinds = {name: f.pointer if name in pointers else f.i64 for name in arguments}
        return f, f.fields(f.args[0], kinds)

    def fields(self, base: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
        """Values of ``kinds``, 8 bytes each, that follow one another from ``base``."""
        return {
            name: self.b.load(self.at(base, index, self.i64), typ=kind)
            for index, (name, kind) in enumerate(kinds.items())
        }

    def thread(self) -> tuple[Any, Any]:
        """This thread's number and how many run the worker, i64."""
        number, count = (
            self.b.zext(self.call(f"omp_get_{n}", self.i32), self.i64) for n in ("thread_num", "num_threads")
        )
        return number, count

    def share(self, count: Any) -> tuple[Any, Any]:
        """First and end of this thread's run of ``count`` things."""
        thread, threads = self.thread()
        begin = self.b.mul(count, thread)
        return self.b.udiv(begin, threads), self.b.udiv(self.b.add(begin, count), threads)

    # Constants and vectors.

    def long(self, value: Any) -> Any:
        """An i64; what is one already stays as it is."""
        return ir.Constant(self.i64, value) if isinstance(value, int) else value

    def constant(self, value: float) -> Any:
        """A single fp32."""
        return ir.Constant(self.f32, value)

    def fill(self, value: float, kind: Any | None = None) -> Any:
        """A constant vector of ``kind``, fp32 by default."""
        return ir.Constant(kind or self.floats, [value] * self.lanes)

    def count_up(self) -> Any:
        """0, 1, 2 ... as i64."""
        return ir.Constant(self.longs, list(range(self.lanes)))

    def splat(self, value: Any) -> Any:
        """A value in every lane."""
        kind = ir.VectorType(value.type, self.lanes)
        nothing = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(nothing, value, ir.Constant(self.i32, 0))
        return self.b.shuffle_vector(first, nothing, self.fill(0, self.ints))

    def shuffle(self, x: Any, y: Any, picks: Sequence[int]) -> Any:
        """Lanes ``picks`` of x and y side by side."""
        return self.b.shuffle_vector(x, y, ir.Constant(self.ints, picks))

    # Memory.

    def at(self, base: Any, index: Any, kind: Any | None = None) -> Any:
        """The address of element ``index`` of an array of ``kind``, fp32 by default."""
        return self.b.gep(base, [self.long(index)], source_etype=kind or self.f32)

    def load(self, base: Any, index: Any = 0, kind: Any | None = None) -> Any:
        """Element ``index`` of an array of ``kind``, fp32 by default."""
        kind = kind or self.f32
        return self.b.load(self.at(base, index, kind), typ=kind)

    def vector(self, base: Any, index: Any = 0, kind: Any | None = None, align: int = 4) -> Any:
        """The vector of ``kind``, fp32 by default, that starts at element ``index``."""
        kind = kind or self.floats
        return self.b.load(self.at(base, index, kind.element), typ=kind, align=align)

    def store(self, value: Any, base: Any, index: Any = 0) -> None:
        """Stores a value or vector from element ``index`` on, of an array of 4 or 8 byte elements."""
        kind = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        self.b.store(value, self.at(base, index, kind), align=4)

    def prefetch(self, address: Any, locality: int) -> None:
        """Fetches a line for reading, into L1 with ``locality`` 3 and into L2 with 2."""
        options = [ir.Constant(self.i32, option) for option in (0, locality, 1)]
        self.call("llvm.prefetch.p0", self.void, address, *options)

    # Operations.

    def call(self, name: str, result: Any, *arguments: Any, fastmath: Sequence[str] = ()) -> Any:
        """Calls LLVM's intrinsic or an outer function ``name``, declared by its first use."""
        callee = self.module.globals.get(name)
        if callee is None:
            callee = ir.Function(self.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(callee, arguments, fastmath=fastmath)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z with one rounding."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, x, y, z)

    def larger(self, x: Any, y: Any) -> Any:
        """The larger one; y where either is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def smaller(self, x: Any, y: Any) -> Any:
        """The smaller of two signed integers."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def any(self, mask: Any) -> Any:
        """Whether some lane of a mask is set."""
        bits = self.b.bitcast(mask, ir.IntType(self.lanes))
        return self.b.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    def peak(self, vector: Any) -> Any:
        """The largest lane of an fp32 vector."""
        return self.call(f"llvm.vector.reduce.fmax.v{self.lanes}f32", self.f32, vector)

    def total(self, vector: Any) -> Any:
        """The sum of all lanes, those of an fp32 vector pairwise."""
        kind = vector.type.element
        if kind == self.f32:
            name = f"llvm.vector.reduce.fadd.v{self.lanes}f32"
            return self.call(name, self.f32, self.constant(0.0), vector, fastmath=("reassoc",))
        return self.call(f"llvm.vector.reduce.add.v{self.lanes}i{kind.width}", kind, vector)

    # Control flow.

    def merge(self, *branches: tuple[Any, Any]) -> Any:
        """The value of whichever (value, block) was gone through."""
        phi = self.b.phi(branches[0][0].type)
        for value, block in branches:
            phi.add_incoming(value, block)
        return phi

    @contextlib.contextmanager
    def loop(
        self, start: Any, stop: Any, step: Any = 1, carried: Sequence[Any] = ()
    ) -> Iterator[tuple[Any, list[Any]]]:
        """``for index in range(start, stop, step)`` around the body.

        Gives (index, values): the body replaces the carried ``values`` in the list, which afterwards holds the last
        ones.
        """
        b, before = self.b, self.b.block
        start, stop, step = self.long(start), self.long(stop), self.long(step)
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
