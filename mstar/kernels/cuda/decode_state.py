"""The head of a captured decode step: lengths, write addresses, positions and rotary tables from the device's state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs

BLOCK_ROWS = 64  # as many as two warps have threads


def next_tokens(
    streams: torch.Tensor,
    advances: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    key_index: torch.Tensor,
    value_index: torch.Tensor,
    page_size: int,
) -> None:
    """As :func:`mstar.kernels.decode_state.next_tokens_reference`."""
    rows = streams.numel()
    _next_tokens_kernel[(triton.cdiv(rows, BLOCK_ROWS),)](
        streams,
        advances,
        lengths,
        table,
        kv_lens,
        key_index,
        value_index,
        rows,
        table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=BLOCK_ROWS,
        **launch_options(lengths, num_warps=2),
    )


def next_positions(
    streams: torch.Tensor,
    advances: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    factor: float,
    interleave: bool,
) -> None:
    """As :func:`mstar.kernels.decode_state.next_positions_reference`; ``cos`` and ``sin`` contiguous."""
    dim = cos.shape[-1]
    _next_positions_kernel[(streams.numel(),)](
        streams,
        advances,
        positions,
        frequencies,
        ids,
        cos,
        sin,
        factor,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        INTERLEAVE=interleave,
        **launch_options(positions, num_warps=1),
    )


@triton.jit
def _next_tokens_kernel(
    streams,
    advances,
    lengths,
    table,
    kv_lens,
    key_index,
    value_index,
    num_rows,
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    release_dependents(USE_PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    wait_for_inputs(USE_PDL)
    stream = tl.load(streams + row, mask=is_row, other=0)
    advance = tl.load(advances + row, mask=is_row, other=0)
    before = tl.load(lengths + stream, mask=is_row, other=0)
    page = tl.load(table + stream.to(tl.int64) * width + before // PAGE_SIZE, mask=is_row, other=0)
    key = page.to(tl.int64) * (2 * PAGE_SIZE) + before % PAGE_SIZE
    tl.store(kv_lens + row, before + 1, mask=is_row)
    tl.store(key_index + row, key, mask=is_row)
    tl.store(value_index + row, key + PAGE_SIZE, mask=is_row)
    tl.store(lengths + stream, before + advance, mask=is_row)


@triton.jit
def _next_positions_kernel(
    streams,
    advances,
    positions,
    frequencies,
    ids,
    cos,
    sin,
    factor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per row, of one warp: no thread may write the position before all have read it."""
    release_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    is_lane = lane < DIM
    if INTERLEAVE:
        pair, sign = lane // 2, tl.where(lane % 2 == 0, -1.0, 1.0)
    else:
        pair, sign = lane % (DIM // 2), tl.where(lane < DIM // 2, -1.0, 1.0)
    frequency = tl.load(frequencies + pair, mask=is_lane, other=0.0)
    wait_for_inputs(USE_PDL)
    stream = tl.load(streams + row)
    position = tl.load(positions + stream)
    angle = position.to(tl.float32) * frequency
    out = row * DIM + lane
    tl.store(cos + out, (tl.cos(angle) * factor).to(cos.dtype.element_ty), mask=is_lane)
    tl.store(sin + out, (tl.sin(angle) * sign * factor).to(sin.dtype.element_ty), mask=is_lane)
    tl.store(ids + row, position.to(tl.int64))
    tl.store(positions + stream, position + tl.load(advances + row))
