"""First pass over the logits: each chunk's maximum, its mass, and how well it may do in its row's race."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import release_dependents, wait_for_inputs
from mstar.kernels.cuda.sampling_plain import earliest, is_plain
from mstar.kernels.cuda.sampling_rules import SETTINGS, needs_total


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def scan_kernel(
    logits, row_stride, vocab, num_chunks, maxima, times, sums,
    temperatures, top_ks, top_ps, min_ps, top_p_firsts, seeds, offsets, index,
    APPLY_FILTERS: tl.constexpr, HAS_INDEX: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs per row), which have several tiles of logits on their way at once.

    ``maxima`` fp32 [rows, CHUNKS]; +inf for a NaN: both are faults.  ``times`` fp32 [rows, CHUNKS] of plain rows, as
    :func:`sampling_plain.earliest` gives them.  ``sums`` fp32 [rows, CHUNKS] of rows that need the mass of the whole
    distribution: about that of a chunk, as if its maximum had a score of 0.
    """
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0)
    x_row = logits + row.to(tl.int64) * row_stride
    temperature, seed = tl.load(temperatures + row), tl.load(seeds + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    plain = is_plain(temperature, top_k, top_p, min_p, vocab, APPLY_FILTERS)
    wants_total = needs_total(top_k, top_p, tl.load(top_p_firsts + row), vocab) & (temperature != 0) & APPLY_FILTERS
    place = row.to(tl.int64)
    if HAS_INDEX:
        place = tl.load(index + row)
    offset = tl.load(offsets + place)
    lane = tl.arange(0, TILE // CHUNK)
    for tile in tl.range(tl.program_id(1), tl.cdiv(vocab, TILE), tl.num_programs(1), num_stages=STAGES):
        token = tile * TILE + lane[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = tl.load(x_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        top = tl.max(tl.where(x == x, x, float("inf")), 1)
        chunk = row * CHUNKS + tile * (TILE // CHUNK) + lane
        is_chunk = tile * (TILE // CHUNK) + lane < num_chunks
        tl.store(maxima + chunk, top, mask=is_chunk)
        if plain:
            tl.store(times + chunk, earliest(x, top, temperature, seed, offset, token), mask=is_chunk)
        elif wants_total:
            score = (x - top[:, None]) * (1 / tl.maximum(temperature, 1e-30))
            # A barred token has no mass, be all of its chunk barred.
            own = tl.where(x > float("-inf"), tl.exp(score), 0.0)
            tl.store(sums + chunk, tl.sum(own, 1), mask=is_chunk)
