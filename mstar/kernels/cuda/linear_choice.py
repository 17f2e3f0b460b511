"""Which cut a projection takes at how many rows; None where cuBLAS and small kernels do better.

What bounds a projection of a decode step: at one row the latency of one round to memory, so that programs should be
many and hold all their weights in registers; at 16, that of the tensor cores' chain of sums, which slices shorten;
beyond, the reads of `x` and of weights from L2, which every program repeats, and how many of them are under way.
Measured on an H200, weights streaming from memory, at 576 to 3,072 inputs.  On Hopper, where `streams` is true,
`stream_choice.py` is asked first.
"""

from __future__ import annotations

from mstar.kernels.cuda.stream_choice import (
    FEW_INPUTS,
    add_stream,
    gate_up_stream,
    norm_linear_stream,
    qkv_stream,
)
from mstar.kernels.cuda.tiles import Tile


def add_tile(rows: int, inputs: int, outputs: int, *, streams: bool = False) -> Tile | None:
    """For `x += y @ weight.T`."""
    if rows == 1:
        return _vector(inputs, outputs)
    if streams and (stream := add_stream(rows, inputs, outputs)):
        return stream
    if rows <= 16:
        return _whole(8, inputs) if inputs <= 2048 else _shared_loop(32, inputs)
    if inputs < FEW_INPUTS:
        if rows <= 64:
            return _loop(16, rows=32)
        return _loop(16 if rows <= 128 else 32) if rows <= 256 else None
    if inputs > 4096:
        return None
    if rows <= 64:
        return _shared_loop(64 if 2 * outputs >= inputs else 32, inputs)
    return _shared_loop(64, inputs) if rows <= 128 and outputs >= 1024 else None


def gate_up_tile(rows: int, inputs: int, outputs: int, *, streams: bool = False) -> Tile | None:
    """For `silu(gate) * up`; `outputs` counts both."""
    if rows == 1:
        return _vector(inputs, outputs)
    if streams and (stream := gate_up_stream(rows, inputs, outputs)):
        return stream
    if inputs >= FEW_INPUTS:
        return _loop(64, stages=12) if rows <= 64 and inputs < 2048 else None
    if rows <= 16:
        return _whole(32, inputs)
    if rows <= 128:
        return _loop(32) if rows <= 64 else _loop(64, stages=5)
    return Tile("loop", 128, 64, 64, 8, stages=6, release="waited") if rows <= 256 else None


def qkv_tile(
    rows: int, inputs: int, outputs: int, head_dim: int, *, has_qk_norm: bool, streams: bool = False
) -> Tile | None:
    """For queries, keys and values that are rotated and stored.  With a q/k norm, a program has whole heads."""
    if streams and (stream := qkv_stream(rows, inputs, outputs, head_dim, has_qk_norm=has_qk_norm)):
        return stream
    if has_qk_norm:
        return None
    if rows == 1:
        return _vector(inputs, outputs)
    if inputs >= FEW_INPUTS:
        return None
    if rows <= 16:
        return _whole(16, inputs)
    return _loop(16 if rows <= 64 else 32) if rows <= 256 else None


def norm_linear_tile(rows: int, inputs: int, outputs: int, *, streams: bool = False) -> Tile | None:
    """For `rms_norm(x) @ weight.T` that a kernel of its own goes on with, as where queries and keys have norms and
    `qkv_tile` has none: programs with whole heads would be too few."""
    if rows == 1:
        return _vector(inputs, outputs)
    return norm_linear_stream(rows, inputs, outputs) if streams else None


def deterministic_tile(columns: int) -> Tile:
    """One cut for any number of rows: a row's sums then have one order, whatever stands beside it."""
    return _loop(columns, stages=4)


def _vector(inputs: int, outputs: int) -> Tile:
    """2,048 weights per load of a program, or few outputs, so that programs are many."""
    chunk = min(inputs & -inputs, 512 if inputs >= 2 * FEW_INPUTS else 256)
    columns = min(8 if outputs <= 1280 else 16, 2048 // chunk)
    return Tile("vector", 1, columns, chunk, min(8, max(1, columns * chunk // 256)))


def _whole(columns: int, inputs: int) -> Tile:
    """Chunks that leave little or no rest."""
    if inputs < 1024:
        return Tile("whole", 16, columns, 128, 4, slices=4, release="waited")
    return Tile("whole", 16, columns, 64 if inputs % 1024 else 128, 8, slices=8, release="waited")


def _loop(columns: int, *, rows: int = 64, stages: int = 9) -> Tile:
    """All chunks of a short sum on their way at once."""
    return Tile("loop", rows, columns, 64, 4, stages=stages, release="waited")


def _shared_loop(columns: int, inputs: int) -> Tile:
    """Four programs for each sum."""
    return Tile("loop", 64, columns, 64, 4, stages=min(9, inputs // 256), splits=4, release="waited")
