"""The check of interpreted kernels' memory finds the faults that it is for."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from triton.runtime.errors import InterpreterError  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")


@triton.jit
def _copy(x, out, count, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out + lane, tl.load(x + lane, mask=lane < count, other=0))


@triton.jit
def _take(x, out, WAITS: tl.constexpr):
    value = tl.load(x)
    if WAITS:
        tl.debug_barrier()
    tl.store(x, 0)
    tl.store(out, value)


@triton.jit
def _put(x, out, WAITS: tl.constexpr):
    tl.store(x, 7)
    if WAITS:
        tl.debug_barrier()
    tl.store(out, tl.load(x))


def test_an_address_has_to_lie_in_a_tensor_of_the_launch():
    x, out = torch.arange(5), torch.zeros(8, dtype=torch.int64)
    _copy[(1,)](x, out, 5, N=8)
    assert out.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    with pytest.raises(InterpreterError, match="outside"):
        _copy[(1,)](x, out, 6, N=8)
    with pytest.raises(InterpreterError, match="outside"):
        _copy[(1,)](x, out[4:], 5, N=8)


@pytest.mark.parametrize(("kernel", "result"), [(_take, 3), (_put, 7)])
def test_threads_of_a_program_have_to_wait_for_a_scalar(kernel, result):
    def run(waits, **options):
        x, out = torch.tensor([3]), torch.tensor([0])
        kernel[(1,)](x, out, WAITS=waits, **options)
        return out.item()

    assert run(True) == run(False, num_warps=1) == result
    for options in ({}, {"num_warps": 8}):
        with pytest.raises(InterpreterError, match="no barrier"):
            run(False, **options)
