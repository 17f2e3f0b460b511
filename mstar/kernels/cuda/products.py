"""Tiles of `x @ weight.T` with fp32 sums, three ways, and the RMS norm of `x` taken along.  Parts of kernels.

A fourth way, for Hopper alone, is in `streams.py`; which serves where, in `linear_choice.py`.

A decode step is a chain of kernels that each read a few hundred kB of weights: what they cost is latency.  So weights,
which no kernel writes, are asked for before `wait_for_inputs` and travel while the kernel before still runs:

- "vector": one to four rows.  The program's weights stand in registers as they were loaded, are multiplied there and
  summed over the lanes that share an output.  No tensor cores, no shared memory.
- "whole": tiles of 16 to 64 rows.  All weights and all of `x` stand in registers.  The sum is cut in `SLICES`, one per
  warp: a single chain of tensor core instructions over 1,536 inputs takes 1.8 us.
- "loop": a loop over the inputs, so deeply pipelined that most of them are asked for at once; tiles go from shared
  memory to the tensor cores as they are.  Weights are brought to L2 beforehand.

The norm's weight stands in the projection's, so that only `1 / rms` is left to multiply, behind the product: one pass
over `x` is enough, and nothing is computed between its load and the product.
"""

# ruff: noqa: RUF005  (Triton does not unpack tuples)
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import release_dependents


@triton.jit
def release_at(PLACE: tl.constexpr, RELEASE: tl.constexpr, USE_PDL: tl.constexpr):
    """`release_dependents` where the tile wants it: "start", or once it has "waited" for inputs."""
    if PLACE == RELEASE:
        release_dependents(USE_PDL)


@triton.jit
def load_weights(
    weight_ptr, columns, IN: tl.constexpr, SPAN: tl.constexpr, WAY: tl.constexpr, SLICES: tl.constexpr,
    CHUNK: tl.constexpr, REST: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """What `product` takes of constants: `SPAN` inputs, from the pointer on, of rows `columns` int32 [N] of `IN`.

    Returns:
        A tuple of pieces of the weight, in registers; empty where a loop fetches them itself.
    """
    weights = ()
    if PREFETCH and tl.program_id(1) == 0:
        _prefetch(weight_ptr, columns, IN, SPAN, PREFETCH)
    here = columns[None, :, None]
    if WAY == "vector":
        at = tl.arange(0, CHUNK)[None, None, :]
        for piece in tl.static_range(IN // CHUNK):
            weights = weights + (tl.load(weight_ptr + here * IN + (piece * CHUNK + at)),)
    elif WAY == "whole":
        FULL: tl.constexpr = IN // (SLICES * CHUNK)
        for piece in tl.static_range(FULL):
            weights = weights + (tl.load(weight_ptr + here * IN + _inputs(piece * SLICES * CHUNK, SLICES, CHUNK)),)
        if REST:
            at = _inputs(FULL * SLICES * CHUNK, SLICES, REST)
            if FULL * SLICES * CHUNK + SLICES * REST == IN:
                weights = weights + (tl.load(weight_ptr + here * IN + at),)
            else:
                weights = weights + (tl.load(weight_ptr + here * IN + at, mask=at < IN, other=0.0),)
    return weights


@triton.jit
def product(
    x_ptr, weight_ptr, weights, columns, first_row, n, eps, IN: tl.constexpr, SPAN: tl.constexpr,
    HAS_NORM: tl.constexpr, WAY: tl.constexpr, M: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Rows `first_row` .. of `x @ weight.T` at `columns`, fp32 [M, N]; with `HAS_NORM` over the root mean square of x.

    Rows from `n` on count as zeros.  `weights` come from `load_weights`.  A "loop" may take `SPAN` of the `IN` inputs.
    """
    rows = first_row + tl.arange(0, M)
    if WAY == "vector":
        return _vector(x_ptr, weights, columns, rows, n, eps, IN, HAS_NORM, CHUNK)
    elif WAY == "whole":
        return _whole(x_ptr, weights, columns, rows, n, eps, IN, HAS_NORM, SLICES, CHUNK, REST)
    else:
        return _loop(x_ptr, weight_ptr, columns, rows, n, eps, IN, SPAN, HAS_NORM, CHUNK)


@triton.jit
def _inputs(START: tl.constexpr, SLICES: tl.constexpr, CHUNK: tl.constexpr):
    return START + tl.arange(0, SLICES)[:, None, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]


@triton.jit
def _prefetch(weight_ptr, columns, IN: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """Asks L2 for weight rows, each in `PARTS` pieces of a multiple of 16 bytes, about one per thread."""
    part = tl.arange(0, PARTS)[None, :] * (SPAN // PARTS)
    size = tl.full((columns.shape[0], PARTS), SPAN // PARTS * weight_ptr.dtype.element_ty.primitive_bitwidth // 8,
                   tl.int32)  # fmt: skip
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [weight_ptr + columns[:, None] * IN + part, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _vector(x_ptr, weights, columns, rows, n, eps, IN: tl.constexpr, HAS_NORM: tl.constexpr, CHUNK: tl.constexpr):
    at = tl.arange(0, CHUNK)[None, None, :]
    # Rows past the last read it again: a mask would set registers to zero beforehand, which ties the loads down.
    # One address per output, so that the values lie in registers as the weights do.
    ptr = x_ptr + tl.minimum(rows, n - 1)[:, None, None] * IN + columns[None, :, None] * 0
    xs = ()
    for piece in tl.static_range(IN // CHUNK):
        xs = xs + (tl.load(ptr + (piece * CHUNK + at)),)
    sums = tl.zeros((rows.shape[0], columns.shape[0], CHUNK), tl.float32)
    squares = tl.zeros((rows.shape[0], columns.shape[0], CHUNK), tl.float32)
    for piece in tl.static_range(IN // CHUNK):
        x = xs[piece].to(tl.float32)
        if HAS_NORM:
            squares += x * x
        sums += x * weights[piece].to(tl.float32)
    result = tl.sum(sums, 2)
    if HAS_NORM:
        result *= tl.rsqrt(tl.sum(squares, 2) / IN + eps)
    return result


@triton.jit
def _whole(
    x_ptr, weights, columns, rows, n, eps, IN: tl.constexpr, HAS_NORM: tl.constexpr, SLICES: tl.constexpr,
    CHUNK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    FULL: tl.constexpr = IN // (SLICES * CHUNK)
    COUNT: tl.constexpr = FULL + (1 if REST else 0)
    ptr = x_ptr + rows[None, :, None] * IN
    inside = (rows < n)[None, :, None]
    xs = ()
    for piece in tl.static_range(FULL):
        xs = xs + (tl.load(ptr + _inputs(piece * SLICES * CHUNK, SLICES, CHUNK), mask=inside, other=0.0),)
    if REST:
        at = _inputs(FULL * SLICES * CHUNK, SLICES, REST)
        if FULL * SLICES * CHUNK + SLICES * REST == IN:
            xs = xs + (tl.load(ptr + at, mask=inside, other=0.0),)
        else:
            xs = xs + (tl.load(ptr + at, mask=inside & (at < IN), other=0.0),)
    tl.debug_barrier()  # no piece goes to shared memory before all are asked for
    squares = tl.zeros((SLICES, rows.shape[0]), tl.float32)
    sums = tl.zeros((SLICES, rows.shape[0], columns.shape[0]), tl.float32)
    for piece in tl.static_range(COUNT):
        if HAS_NORM:
            x = xs[piece].to(tl.float32)
            squares += tl.sum(x * x, 2)
        sums = tl.dot(xs[piece], tl.permute(weights[piece], (0, 2, 1)), sums)
    result = tl.sum(sums, 0)
    if HAS_NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / IN + eps)[:, None]
    return result


@triton.jit
def _loop(
    x_ptr, weight_ptr, columns, rows, n, eps, IN: tl.constexpr, SPAN: tl.constexpr, HAS_NORM: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    x_rows = x_ptr + rows[:, None] * IN
    weight_rows = weight_ptr + columns[None, :] * IN
    inside = (rows < n)[:, None]
    squares = tl.zeros((rows.shape[0], CHUNK), tl.float32)
    sums = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    one = 1.0 + 0.0 * eps
    for start in range(0, SPAN, CHUNK):
        at = start + tl.arange(0, CHUNK)
        if SPAN % CHUNK == 0:
            x = tl.load(x_rows + at[None, :], mask=inside, other=0.0)
            weight = tl.load(weight_rows + at[:, None])
        else:
            x = tl.load(x_rows + at[None, :], mask=inside & (at < SPAN)[None, :], other=0.0)
            weight = tl.load(weight_rows + at[:, None], mask=(at < SPAN)[:, None], other=0.0)
        if HAS_NORM:
            # What a warpgroup's product reads from where it was copied to, and others read too, Triton 3.6 gives one
            # place too few: the next copy comes while the product still reads.  With a factor in between that is 1,
            # which no compiler knows, it multiplies out of registers.
            wide = x.to(tl.float32) * one
            squares += wide * wide
            x = wide.to(x.dtype)
        sums = tl.dot(x, weight, sums)
    if HAS_NORM:
        sums *= tl.rsqrt(tl.sum(squares, 1) / IN + eps)[:, None]
    return sums
