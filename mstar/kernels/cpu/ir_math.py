"""Exponential and logarithm of fp32 vectors in LLVM IR (polynomials of Cephes' expf and logf)."""

from __future__ import annotations

from typing import Any

from mstar.kernels.cpu.ir import IrFunction
from mstar.kernels.sampling import LN2_HIGH, LN2_LOW, LOG2_E

_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LN2_HIGH, _EXP_LN2_LOW = 0.693359375, -2.12194440e-4
_LOWEST_EXP = -87.3  # below, the result is no normal number
_LOG_TERMS = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1, -0.5),
)
_SQRT_HALF_BITS = 0x3F3504F3


def exp(f: IrFunction, x: Any) -> Any:
    """exp of x <= 0 to 2e-7 relative, NaN for NaN, 0 below -87.3."""
    b = f.b
    # A float this large has no fraction, so its low bits hold n + 127, which is the exponent of 2^n.
    magic = f.fill(1.5 * 2**23 + 127)
    shifted = f.fma(x, f.fill(LOG2_E), magic)
    n = b.fsub(shifted, magic)
    r = f.fma(n, f.fill(-_EXP_LN2_HIGH), x)
    r = f.fma(n, f.fill(-_EXP_LN2_LOW), r)
    y = f.fill(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        y = f.fma(y, r, f.fill(term))
    y = b.fadd(f.fma(b.fmul(r, r), y, r), f.fill(1.0))
    power = b.shl(b.bitcast(shifted, f.ints), f.fill(23, f.ints))
    y = b.fmul(y, b.bitcast(power, f.floats))
    return b.select(b.fcmp_ordered("<", x, f.fill(_LOWEST_EXP)), f.fill(0.0), y)


def log(f: IrFunction, x: Any) -> Any:
    """Natural logarithm of normal positive numbers, within 1e-7 relatively (near 1 too)."""
    b = f.b
    bits = b.sub(b.bitcast(x, f.ints), f.fill(_SQRT_HALF_BITS, f.ints))
    exponent = b.sitofp(b.ashr(bits, f.fill(23, f.ints)), f.floats)
    mantissa = b.add(b.and_(bits, f.fill(0x7FFFFF, f.ints)), f.fill(_SQRT_HALF_BITS, f.ints))
    r = b.fsub(b.bitcast(mantissa, f.floats), f.fill(1.0))  # -0.3 .. 0.42
    y = f.fill(_LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        y = f.fma(y, r, f.fill(term))
    y = f.fma(exponent, f.fill(LN2_LOW), b.fmul(b.fmul(y, r), r))
    return f.fma(exponent, f.fill(LN2_HIGH), b.fadd(y, r))
