"""Each row's maximum and faults, and its token unless filters need more than a few of the best ones."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels import sampling
from mstar.kernels.cuda.pdl import release_dependents, wait_for_inputs
from mstar.kernels.cuda.sampling_near import FEW, MOST_CLOSE, MOST_NEAR, collect_near, draw_among
from mstar.kernels.cuda.sampling_nucleus import LEAST_TOP_P, SUM_SLACK
from mstar.kernels.cuda.sampling_plain import first_above, hopes, is_plain
from mstar.kernels.cuda.sampling_rules import (
    BEST,
    DONE,
    ESTIMATE,
    FAULT,
    FLOOR,
    NEAR,
    NO_FAULT,
    NOISE,
    NOT_FINITE,
    NOTHING_LEFT,
    OFFSET,
    PEAK,
    PHASE,
    RACE,
    SETTINGS,
    STATE,
    SURVEY,
    TOKEN,
    bits_of,
    needs_total,
    scaled_scores,
)

_MASS_BITS = tl.constexpr(sampling.MASS_BITS)
MOST_LISTED_K = tl.constexpr(1024)
_FIRST_LISTED = tl.constexpr(128)  # tokens looked at before the nucleus is known to need more


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def shortlist_kernel(
    logits, row_stride, vocab, num_chunks, maxima, times, sums, states,
    temperatures, top_ks, top_ps, min_ps, top_p_firsts, min_keeps, seeds, offsets, index,
    close, near_scores, near_masses, near_tokens,
    APPLY_FILTERS: tl.constexpr, IS_CONSTRAINED: tl.constexpr, HAS_INDEX: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,).  Takes each row from its chunks' ``maxima``, ``times`` and ``sums``, fp32 [rows, CHUNKS], to its
    first phase.

    ``close`` int32 [rows, MOST_CLOSE] and the lists of near tokens [rows, MOST_NEAR] are filled where needed.
    """
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0)
    x_row, state = logits + row.to(tl.int64) * row_stride, states + row * STATE
    near_scores += row * MOST_NEAR
    near_masses += row * MOST_NEAR
    near_tokens += row * MOST_NEAR
    temperature, min_p, seed = tl.load(temperatures + row), tl.load(min_ps + row), tl.load(seeds + row)
    top_k, top_p, min_keep = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_keeps + row)
    wants_total = needs_total(top_k, top_p, tl.load(top_p_firsts + row), vocab) & APPLY_FILTERS
    place = row.to(tl.int64)
    if HAS_INDEX:
        place = tl.load(index + row)
    offset = tl.load(offsets + place)
    has_k = (top_k > 0) & (top_k < vocab) & APPLY_FILTERS
    has_p = (top_p < 1) & APPLY_FILTERS
    is_greedy = (temperature == 0) | ((top_k == 1) & APPLY_FILTERS)
    plain = is_plain(temperature, top_k, top_p, min_p, vocab, APPLY_FILTERS)
    temperature = tl.maximum(temperature, 1e-30)

    wanted = tl.where(wants_total, _FIRST_LISTED, 0)
    wanted = tl.where(has_k & (top_k <= MOST_LISTED_K), top_k.to(tl.int32), wanted)

    chunk = tl.arange(0, CHUNKS)
    top = tl.load(maxima + row * CHUNKS + chunk, mask=chunk < num_chunks, other=float("-inf"))
    peak = tl.max(top)
    tl.store(state + PHASE, DONE)
    tl.store(state + FAULT, NO_FAULT)
    tl.store(state + OFFSET, offset)
    if (peak > float("-inf")) & (peak < float("inf")):
        first = tl.min(tl.where(top == peak, chunk, CHUNKS)) * CHUNK
        inner = tl.arange(0, CHUNK)
        x = tl.load(x_row + first + inner, mask=first + inner < vocab, other=float("-inf")).to(tl.float32)
        best = first + tl.min(tl.where(x == peak, inner, CHUNK))
        tl.store(state + TOKEN, best)
        if plain:
            time = tl.load(times + row * CHUNKS + chunk, mask=chunk < num_chunks, other=float("inf"))
            hope = hopes(top, time, peak, temperature)
            token, _ = first_above(
                x_row, vocab, hope, peak, temperature, best, peak * 0 + float("-inf"), seed, offset, CHUNK, CHUNKS
            )
            tl.store(state + TOKEN, token)
        elif not is_greedy:
            floor = tl.log(min_p)
            tl.store(state + BEST, best)
            tl.store(state + PEAK, bits_of(peak))
            tl.store(state + FLOOR, bits_of(floor))
            tl.store(state + NEAR, -1)
            tl.store(state + PHASE, tl.where(has_k | has_p, SURVEY, RACE))
            if wanted > 0:
                near = collect_near(
                    x_row, vocab, num_chunks, top, peak, temperature, wanted,
                    close + row * MOST_CLOSE, near_scores, near_tokens, CHUNK, CHUNKS, TILE,
                )  # fmt: skip
                tl.store(state + NEAR, near)
                total = peak * 0
                if wants_total:
                    own = tl.load(sums + row * CHUNKS + chunk, mask=chunk < num_chunks, other=0.0)
                    total = tl.sum(tl.exp(scaled_scores(top, peak, temperature)) * own)
                    tl.store(state + ESTIMATE, bits_of(total))
                is_settled = False
                if (near > 0) & (near <= FEW) & ((wants_total == 0) | (min_p == 0)):
                    unit = total.to(tl.float64) * 2.0**_MASS_BITS
                    token, is_settled = draw_among(
                        near_scores, near_masses, near_tokens, near, vocab, tl.where(has_k, top_k, vocab),
                        has_k & (top_k <= MOST_LISTED_K), tl.where(has_p, top_p, 1.0), min_keep, floor,
                        unit * (1 - SUM_SLACK), unit * (1 + SUM_SLACK), wants_total, seed, offset, FEW,
                    )  # fmt: skip
                    tl.store(state + TOKEN, token)
                is_wide = (has_k == 0) & (min_p == 0) & (min_keep <= 1) & (top_p >= LEAST_TOP_P)
                tl.store(state + PHASE, tl.where(is_settled, DONE, tl.where(is_wide, NOISE, SURVEY)))
    else:
        tl.store(state + TOKEN, 0)
        tl.store(state + FAULT, tl.where(IS_CONSTRAINED & (peak == float("-inf")), NOTHING_LEFT, NOT_FINITE))
