"""Which "stream" a projection takes on a Hopper GPU at 2 to 256 rows; None where another way is faster.

The grid is one wave: what is measured as a chain of layers then costs least where 36 to 128 programs have tiles as wide
as that allows, for every program reads its rows of x.  Measured on an H200 at 576 to 3,072 inputs; other shapes take a
tile measured beside them, or none.
"""

from __future__ import annotations

from dataclasses import replace

import triton

from mstar.kernels.cuda.tiles import SHARED_BYTES, Tile

MULTIPROCESSORS = 132
ROWS = 64  # of a warpgroup's product
CHUNK = 128
OTHER_BYTES = 1024  # of shared memory: sums of squares, and what warps tell each other
FEW_INPUTS = 1024
MANY_INPUTS = 2048
MAX_INPUTS = 4096


def add_stream(rows: int, inputs: int, outputs: int) -> Tile | None:
    """For `x += y @ weight.T`."""
    if inputs > MANY_INPUTS:
        columns = 32
    elif rows <= 64:
        columns = 16
    elif outputs >= 1024 or (rows <= 128 and inputs >= FEW_INPUTS):
        columns = 32
    else:
        columns = 64
    return _in_one_wave(_stream(columns, inputs), rows, inputs, outputs)


def gate_up_stream(rows: int, inputs: int, outputs: int) -> Tile | None:
    """For `silu(gate) * up`; `outputs` counts both."""
    if inputs >= MANY_INPUTS:
        return None
    if inputs >= FEW_INPUTS:
        columns = 128
    else:
        columns = 32 if rows <= 16 else 64 if rows <= 64 else 128
    return _in_one_wave(_stream(columns, inputs), rows, inputs, outputs)


def qkv_stream(rows: int, inputs: int, outputs: int, head_dim: int, *, has_qk_norm: bool) -> Tile | None:
    """For queries, keys and values that are rotated and stored; with a q/k norm a program has whole heads."""
    if inputs >= MANY_INPUTS or head_dim not in (64, 128) or (inputs < FEW_INPUTS and rows <= 16):
        return None
    is_half = inputs < FEW_INPUTS and rows <= 128 and not has_qk_norm
    return _in_one_wave(_stream(head_dim // 2 if is_half else head_dim, inputs), rows, inputs, outputs)


def norm_linear_stream(rows: int, inputs: int, outputs: int) -> Tile | None:
    """For `rms_norm(x) @ weight.T` that a kernel of its own goes on with."""
    if rows > 64 or not FEW_INPUTS <= inputs < MANY_INPUTS:
        return None
    return _in_one_wave(_stream(64, inputs), rows, inputs, outputs)


def _stream(columns: int, inputs: int) -> Tile:
    """As many stages as shared memory has room for."""
    tile = Tile("stream", ROWS, columns, CHUNK, ROWS // 16)
    room = (SHARED_BYTES - OTHER_BYTES) // tile.stage_bytes
    return replace(tile, stages=min(room, triton.cdiv(inputs, CHUNK)))


def _in_one_wave(tile: Tile, rows: int, inputs: int, outputs: int) -> Tile | None:
    if not 1 < rows <= 256 or inputs > MAX_INPUTS or not tile.fits(inputs, outputs):
        return None
    programs = outputs // tile.columns * triton.cdiv(rows, tile.rows)
    return tile if programs <= MULTIPROCESSORS else None
