"""First pass over the logits: the maximum of every chunk of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import release_dependents, wait_for_inputs


@triton.jit
def scan_kernel(
    logits, row_stride, vocab, num_chunks, maxima,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs per row).  ``maxima`` fp32 [rows, CHUNKS]; +inf for a NaN: both are faults."""
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0)
    x_row = logits + row.to(tl.int64) * row_stride
    lane = tl.arange(0, TILE // CHUNK)
    for tile in range(tl.program_id(1), tl.cdiv(vocab, TILE), tl.num_programs(1)):
        token = tile * TILE + lane[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = tl.load(x_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        chunk = tile * (TILE // CHUNK) + lane
        tl.store(maxima + row * CHUNKS + chunk, tl.max(tl.where(x == x, x, float("inf")), 1), mask=chunk < num_chunks)
