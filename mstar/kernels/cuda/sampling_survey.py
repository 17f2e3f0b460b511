"""Second pass, for rows whose filters need more than a list: how many tokens lie where, or who wins without filters."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import release_dependents, wait_for_inputs
from mstar.kernels.cuda.sampling_near import MOST_NEAR, draw_near
from mstar.kernels.cuda.sampling_nucleus import draw_candidates, time_chunks
from mstar.kernels.cuda.sampling_rules import (
    BEST,
    BIN_WIDTH,
    BRACKET,
    CHECK,
    DONE,
    FLOOR,
    HIGH,
    LOW,
    NEAR,
    NOISE,
    OFFSET,
    PEAK,
    PHASE,
    SETTINGS,
    STATE,
    SURVEY,
    SURVEY_BINS,
    TOKEN,
    TOTAL,
    bin_of,
    fixed_mass,
    float_of,
    is_last_of,
    needs_total,
    scaled_scores,
)
from mstar.kernels.cuda.sampling_shortlist import MOST_LISTED_K

_SHARES = tl.constexpr(16)  # of programs, read together


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def survey_kernel(
    logits, row_stride, vocab, num_chunks, maxima, times, arrivals, states,
    temperatures, top_ks, top_ps, top_p_firsts, min_keeps, seeds,
    near_scores, near_masses, near_tokens, masses, counts,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs per row).  Each program's share: ``masses`` int64 [rows, programs], ``counts`` int32
    [rows, programs, SURVEY_BINS]; or its chunks of ``times`` fp32 [rows, CHUNKS]."""
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row, programs = tl.program_id(0), tl.num_programs(1)
    state = states + row * STATE
    phase = tl.load(state + PHASE)
    if (phase != SURVEY) & (phase != NOISE):
        return
    peak, floor = float_of(tl.load(state + PEAK)), float_of(tl.load(state + FLOOR))
    temperature = tl.maximum(tl.load(temperatures + row), 1e-30)
    x_row = logits + row.to(tl.int64) * row_stride
    if phase == NOISE:
        seed, offset = tl.load(seeds + row), tl.load(state + OFFSET)
        maxima += row * CHUNKS
        times += row * CHUNKS
        time_chunks(x_row, vocab, num_chunks, maxima, times, temperature, seed, offset, CHUNK, TILE)
        if is_last_of(arrivals, row, programs):
            draw_candidates(
                x_row, vocab, num_chunks, maxima, times, peak, temperature, tl.load(top_ps + row),
                tl.load(state + BEST).to(tl.int32), seed, offset, state,
                near_scores + row * MOST_NEAR, near_tokens + row * MOST_NEAR, CHUNK, CHUNKS,
            )  # fmt: skip
            tl.store(state + PHASE, CHECK)
    else:
        near, top_k = tl.load(state + NEAR), tl.load(top_ks + row)
        has_k = (top_k > 0) & (top_k < vocab)
        # Then only the mass is missing, if that.
        is_listed = (near > 0) & has_k & (top_k <= MOST_LISTED_K)
        wants_total = needs_total(top_k, tl.load(top_ps + row), tl.load(top_p_firsts + row), vocab)
        num_tiles = tl.where(is_listed & ~wants_total, 0, tl.cdiv(vocab, TILE))
        mass = tl.zeros((TILE,), tl.int64)
        count = tl.zeros((SURVEY_BINS,), tl.int32)
        for tile in range(tl.program_id(1), num_tiles, programs):
            token = tile * TILE + tl.arange(0, TILE)
            x = tl.load(x_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            scores = scaled_scores(x, peak, temperature)
            if wants_total:
                mass += tl.where(scores >= floor, fixed_mass(scores), 0)  # none past the row's end: exp(-inf)
            if not is_listed:
                count += tl.histogram(bin_of(scores), SURVEY_BINS, mask=token < vocab)
        share = row * programs + tl.program_id(1)
        bins = tl.arange(0, SURVEY_BINS)
        tl.store(masses + share, tl.sum(mass))
        tl.store(counts + share * SURVEY_BINS + bins, count)
        if is_last_of(arrivals, row, programs):
            _settle(
                vocab, programs, state, row, floor, top_ks, top_ps, top_p_firsts, min_keeps, seeds,
                near_scores + row * MOST_NEAR, near_masses + row * MOST_NEAR, near_tokens + row * MOST_NEAR,
                masses + row * programs, counts + row * programs * SURVEY_BINS, PROGRAMS,
            )  # fmt: skip


@triton.jit
def _settle(
    vocab, programs, state, row, floor, top_ks, top_ps, top_p_firsts, min_keeps, seeds,
    near_scores, near_masses, near_tokens, masses, counts, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Draws from the list of near tokens where that decides; else finds the bins where the filters may cut."""
    top_k, top_p, min_keep = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_keeps + row)
    seed, offset, near = tl.load(seeds + row), tl.load(state + OFFSET), tl.load(state + NEAR).to(tl.int32)
    has_k = (top_k > 0) & (top_k < vocab)
    has_p = top_p < 1
    top_p_first = tl.load(top_p_firsts + row)
    wants_total, k_comes_first = needs_total(top_k, top_p, top_p_first, vocab), has_k & (top_p_first == 0)
    bins = tl.arange(0, SURVEY_BINS)
    share = tl.arange(0, PROGRAMS)
    total = tl.sum(tl.load(masses + share, mask=share < programs, other=0, cache_modifier=".cg"))
    tl.store(state + TOTAL, total)
    is_settled = False
    if near > 0:
        token, is_settled = draw_near(
            near_scores, near_masses, near_tokens, near, vocab, tl.where(has_k, top_k, vocab),
            has_k & (top_k <= MOST_LISTED_K), tl.where(has_p, top_p, 1.0), min_keep, floor, total, wants_total, seed,
            offset,
        )  # fmt: skip
        tl.store(state + TOKEN, token)
    if is_settled:
        tl.store(state + PHASE, DONE)
    else:
        count = tl.zeros((SURVEY_BINS,), tl.int32)
        for start in range(0, programs, _SHARES):
            some = start + tl.arange(0, _SHARES)[:, None]
            at = counts + some * SURVEY_BINS + bins[None, :]
            count += tl.sum(tl.load(at, mask=some < programs, other=0, cache_modifier=".cg"), 0)
        # Any token of a bin has at least the mass of the bin's lower edge, and at most that of its upper one.
        edge = bins.to(tl.float32) * -BIN_WIDTH
        least = tl.where(bins == SURVEY_BINS - 1, 0, tl.maximum(fixed_mass(edge - BIN_WIDTH) - 1, 0))
        upto, wide = tl.cumsum(count), count.to(tl.int64)
        at_least, at_most = tl.cumsum(wide * least), tl.cumsum(wide * (fixed_mass(edge) + 1))
        target = total.to(tl.float64) * top_p.to(tl.float64)
        has_rank = upto >= tl.where(has_k, top_k, vocab)
        may_end = upto >= tl.where(has_p & (k_comes_first == 0), min_keep, vocab)
        low = tl.sum((~((may_end & (at_most.to(tl.float64) >= target)) | has_rank)).to(tl.int32))
        high = tl.sum((~((may_end & (at_least.to(tl.float64) >= target)) | has_rank)).to(tl.int32))
        # Two cuts, of which the second is of what the first one leaves: all of that is looked at.
        low = tl.where(k_comes_first & has_p, 0, low)
        tl.store(state + LOW, tl.minimum(low, SURVEY_BINS - 1))
        tl.store(state + HIGH, tl.minimum(high, SURVEY_BINS - 1))
        tl.store(state + PHASE, BRACKET)
