"""Tiles of `x @ weight.T` from streams of TMA copies, for Hopper's warpgroup products.  Parts of Gluon kernels.

What a projection of 16 to 256 rows spends its time on is bringing `x` and weights to shared memory.  Here warps of a
program have tasks of their own, and tensor cores read blocks where they come:

- one warp asks for blocks, a ring of `STAGES` of x and weight: it waits for nothing but room.  Weights, which no kernel
  writes, are asked for before `wait_for_inputs`;
- four warps sum the squares of x, for its norm;
- the kernel's own warps multiply, and go on with the sums:

    stream = open_stream(x_desc, weight_desc, STAGES, HAS_NORM)
    (sums,) = gl.warp_specialize([
        (multiply_waited, (stream, N, COUNT, STAGES, USE_PDL)),
        (ask, (x_desc, weight_desc, stream, ..., COUNT, STAGES, USE_PDL)),
        (square, (stream, COUNT, STAGES, HAS_NORM)),
    ], [ASK_WARPS, SQUARE_WARPS], [ASK_REGISTERS, SQUARE_REGISTERS])
    sums = normed(sums, stream, eps, IN)

Each kernel has a `multiply_waited` of its own, which waits for inputs, reads what else it needs, and calls `multiply`.
Blocks past the last input are zeros, and so are rows past those of x.
"""

# ruff: noqa: RUF005  (Gluon does not unpack)
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mstar.kernels.cuda.pdl import wait_for_inputs

ASK_WARPS = gl.constexpr(1)
ASK_REGISTERS = gl.constexpr(40)
SQUARE_WARPS = gl.constexpr(4)
SQUARE_REGISTERS = gl.constexpr(64)

# Their names since Triton 3.8 and 3.9, and before.
_copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_CAN_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether these kernels run on `device`: the products are Hopper's own (compute capability 9.0).  Gluon has no
    interpreter."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def describe_inputs(x: torch.Tensor, rows: int, chunk: int) -> TensorDescriptor:
    """`x` [n, inputs], contiguous, in blocks of [rows, chunk]."""
    return _describe(x, [rows, chunk])


def describe_weight(weight: torch.Tensor, columns: int, chunk: int, pair_width: int = 0) -> TensorDescriptor:
    """`weight` [outputs, inputs], contiguous, in blocks of [columns, chunk].

    With `pair_width`, outputs are pairs of this many rows each, and a block takes half its columns from both of a pair.
    """
    if not pair_width:
        return _describe(weight, [columns, chunk])
    return _describe(weight.view(-1, pair_width, weight.shape[1]), [2, columns // 2, chunk])


def _describe(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 16, len(block))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


@gluon.constexpr_function
def out_layout(columns: int, warps: int) -> Any:
    """Of a tile [.., columns] on its way to memory: 16 bytes of 16-bit floats per thread, if there are as many."""
    beside = min(8, columns)
    lanes = min(32, columns // beside)
    return gl.BlockedLayout([1, beside], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def sums_layout(columns: int, warps: int) -> Any:
    """Of the sums of a tile [.., columns], as warpgroups give them."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def open_stream(x_desc, weight_desc, STAGES: gl.constexpr, HAS_NORM: gl.constexpr):
    """What a program's warps share.

    Returns:
        A tuple: blocks of the weight and of x, barriers for both blocks of a stage to be there and to have been read,
        and room for the sums of squares.
    """
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    squares = gl.allocate_shared_memory(gl.float32, [x_desc.block_shape[0]], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2 if HAS_NORM else 1)
    return weights, xs, ready, empty, squares


@gluon.jit
def ask(x_desc, weight_desc, stream, pair, row, first_row, COUNT: gl.constexpr, STAGES: gl.constexpr,
        USE_PDL: gl.constexpr):  # fmt: skip
    """One warp's task: `COUNT` blocks, of x from row `first_row` and of the weight from row `row` (of pair `pair`)."""
    weights, xs, ready, empty, _ = stream
    CHUNK: gl.constexpr = x_desc.block_shape[1]
    BYTES: gl.constexpr = x_desc.block_type.nbytes + weight_desc.block_type.nbytes
    for stage in gl.static_range(STAGES):
        mbarrier.expect(ready.index(stage), BYTES)
        _copy_weight(weight_desc, pair, row, stage * CHUNK, ready.index(stage), weights.index(stage))
    wait_for_inputs(USE_PDL)
    for stage in gl.static_range(STAGES):
        _copy_block(x_desc, [first_row, stage * CHUNK], ready.index(stage), xs.index(stage))
    for step in range(STAGES, COUNT):
        again = step % STAGES
        mbarrier.wait(empty.index(again), (step // STAGES + 1) & 1)
        mbarrier.expect(ready.index(again), BYTES)
        _copy_weight(weight_desc, pair, row, step * CHUNK, ready.index(again), weights.index(again))
        _copy_block(x_desc, [first_row, step * CHUNK], ready.index(again), xs.index(again))


@gluon.jit
def _copy_weight(desc, pair, row, first_input, ready, to):
    if len(desc.block_shape) == 3:
        _copy_block(desc, [pair, row, first_input], ready, to)
    else:
        _copy_block(desc, [row, first_input], ready, to)


@gluon.jit
def square(stream, COUNT: gl.constexpr, STAGES: gl.constexpr, HAS_NORM: gl.constexpr):
    """Four warps' task: sums of the squares of x, for `normed`; nothing without `HAS_NORM`."""
    _, xs, ready, empty, squares = stream
    if HAS_NORM:
        M: gl.constexpr = xs.shape[1]
        READ: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        sums = gl.zeros([M], gl.float32, gl.SliceLayout(1, READ))
        for step in range(COUNT):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            x = xs.index(stage).load(READ).to(gl.float32)
            sums += gl.sum(x * x, 1)
            fence_async_shared()  # these reads come before the copy that takes their place
            mbarrier.arrive(empty.index(stage), count=1)
        squares.store(sums)


@gluon.jit
def multiply(stream, N: gl.constexpr, COUNT: gl.constexpr, STAGES: gl.constexpr):
    """The product over `COUNT` blocks, fp32 [M, N] in `sums_layout`."""
    weights, xs, ready, empty, _ = stream
    M: gl.constexpr = xs.shape[1]
    CHUNK: gl.constexpr = xs.shape[2]
    SUMS: gl.constexpr = sums_layout(N, gl.num_warps())
    sums = gl.zeros([M, N], gl.float32, SUMS)
    for step in range(COUNT):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        weight = _rows_of(weights.index(stage), xs.dtype, N, CHUNK)
        sums = warpgroup_mma(xs.index(stage), weight.permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))  # the step before has been read
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    return warpgroup_mma_wait(0, deps=(sums,))


@gluon.jit
def normed(sums, stream, eps, IN: gl.constexpr):
    """The product over the root mean square of x, once the stream's tasks are done."""
    squares = stream[4].load(gl.SliceLayout(1, sums.type.layout))
    return sums * gl.rsqrt(squares / IN + eps)[:, None]


@gluon.jit
def _rows_of(block, DTYPE: gl.constexpr, N: gl.constexpr, CHUNK: gl.constexpr):
    """A block of the weight as [N, CHUNK], if it comes from pairs, too."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if _CAN_REINTERPRET:
        return block.reinterpret(DTYPE, [N, CHUNK], LAYOUT)
    else:
        return block._reinterpret(DTYPE, [N, CHUNK], LAYOUT)


@gluon.jit
def halves(sums):
    """Of [M, N], the first and the last N / 2 columns, in `out_layout`."""
    M: gl.constexpr = sums.shape[0]
    HALF: gl.constexpr = sums.shape[1] // 2
    OUT: gl.constexpr = out_layout(HALF, gl.num_warps())
    first, second = gl.split(gl.permute(gl.reshape(sums, [M, 2, HALF]), (0, 2, 1)))
    return gl.convert_layout(first, OUT), gl.convert_layout(second, OUT)
