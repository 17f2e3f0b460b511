"""Writing fp32 vector code in LLVM IR: loops, loads, intrinsics and an exponential."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mstar.kernels.cpu_jit import ir


@dataclass
class Loop:
    """``index`` and ``values`` of the current pass; ``next`` is set by the body.  After the loop ``values`` are the
    last ones."""

    index: Any
    values: Sequence[Any]
    next: Sequence[Any] = field(default_factory=list)


@contextlib.contextmanager
def loop(b: Any, start: Any, stop: Any, step: int, values: Sequence[Any] = ()) -> Iterator[Loop]:
    """``for index in range(start, stop, step)`` around the body, with ``values`` carried from pass to pass."""
    before = b.block
    head, body, end = (b.append_basic_block(name) for name in ("head", "body", "end"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(start.type)
    phis = [b.phi(value.type) for value in values]
    b.cbranch(b.icmp_signed("<", index, stop), body, end)
    b.position_at_end(body)
    loop = Loop(index, phis)
    yield loop
    index.add_incoming(start, before)
    index.add_incoming(b.add(index, i64(step)), b.block)
    for phi, value, following in zip(phis, values, loop.next, strict=True):
        phi.add_incoming(value, before)
        phi.add_incoming(following, b.block)
    b.branch(head)
    b.position_at_end(end)


def i64(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


class VectorCode:
    """A function being written with vectors of ``lanes`` fp32; ``b`` is its builder."""

    def __init__(self, module: Any, function: Any, lanes: int) -> None:
        self.module, self.lanes = module, lanes
        self.f32 = ir.FloatType()
        self.vector = ir.VectorType(self.f32, lanes)
        self.b = ir.IRBuilder(function.append_basic_block())

    def splat(self, value: float) -> Any:
        return ir.Constant(self.vector, [value] * self.lanes)

    def broadcast(self, scalar: Any) -> Any:
        kind = ir.VectorType(scalar.type, self.lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

    def at(self, base: Any, offset: Any) -> Any:
        return self.b.gep(base, [offset], source_etype=self.f32)

    def load(self, base: Any, offset: int = 0) -> Any:
        return self.b.load(self.at(base, i64(offset)), typ=self.vector, align=4)

    def store(self, value: Any, base: Any, offset: int = 0) -> None:
        self.b.store(value, self.at(base, i64(offset)), align=4)

    def intrinsic(self, name: str, result: Any, arguments: Sequence[Any], **flags: Any) -> Any:
        name = f"llvm.{name}.v{self.lanes}f32"
        callee = self.module.globals.get(name)
        if callee is None:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            callee = ir.Function(self.module, kind, name)
        return self.b.call(callee, arguments, **flags)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.intrinsic("fma", self.vector, [x, y, z])

    def exp(self, x: Any) -> Any:
        """exp of x <= 0 to 2e-7 relative, NaN for NaN, 0 below -87.3 (Cephes' expf)."""
        b = self.b
        # A float this large has no fraction, so its low bits hold n + 127, which is the exponent of 2^n.
        magic = self.splat(1.5 * 2**23 + 127)
        shifted = self.fma(x, self.splat(1.44269504088896341), magic)
        n = b.fsub(shifted, magic)
        r = self.fma(n, self.splat(-0.693359375), x)
        r = self.fma(n, self.splat(2.12194440e-4), r)
        y = self.splat(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            y = self.fma(y, r, self.splat(c))
        y = b.fadd(self.fma(b.fmul(r, r), y, r), self.splat(1.0))
        ints = ir.VectorType(ir.IntType(32), self.lanes)
        power = b.shl(b.bitcast(shifted, ints), ir.Constant(ints, [23] * self.lanes))
        y = b.fmul(y, b.bitcast(power, self.vector))
        return b.select(b.fcmp_ordered("<", x, self.splat(-87.3)), self.splat(0.0), y)
