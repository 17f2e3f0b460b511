"""Third pass, for rows whose cut lies among many tokens: the exact score of the cut, among those of a few bins."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import release_dependents, wait_for_inputs
from mstar.kernels.cuda.sampling_near import MOST_NEAR
from mstar.kernels.cuda.sampling_nucleus import CANDIDATES, choose_candidate, sum_above
from mstar.kernels.cuda.sampling_rules import (
    BRACKET,
    CHECK,
    DONE,
    FLOOR,
    HIGH,
    LOW,
    PEAK,
    PHASE,
    RACE,
    SETTINGS,
    STATE,
    TOKEN,
    TOTAL,
    bin_of,
    bits_of,
    depth_of,
    fixed_mass,
    float_of,
    is_last_of,
    scaled_scores,
    score_at,
)

_DEEPEST = tl.constexpr(0x7F800000)  # the depth of -inf
_WAYS = tl.constexpr(8)
_PIECE, _WIDE = tl.constexpr(512), tl.constexpr(2048)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def bracket_kernel(
    logits, row_stride, vocab, arrivals, listed, states,
    temperatures, top_ks, top_ps, top_p_firsts, min_keeps, near_scores, near_tokens,
    masses, ranges, depths, most_listed, sums,
    TILE: tl.constexpr, PROGRAMS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs per row).

    Each program's share: ``masses`` int64 [rows, programs], the mass above the bins; ``ranges`` int32 [rows,
    programs, 3], the number of tokens above them, and the least and greatest depth in them.  ``depths`` int32 [rows,
    most_listed]: those in them, ``listed`` int32 [rows] of them, which is 0 again when the kernel ends.  Or ``sums``
    fp32 [rows, programs, CANDIDATES], the mass above each candidate.
    """
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row, programs = tl.program_id(0), tl.num_programs(1)
    vocab += row * 0  # a launch makes a 1 a constant, which no loop could change
    state = states + row * STATE
    phase = tl.load(state + PHASE)
    if phase == CHECK:
        peak, temperature = float_of(tl.load(state + PEAK)), tl.maximum(tl.load(temperatures + row), 1e-30)
        x_row, sums = logits + row.to(tl.int64) * row_stride, sums + row * programs * CANDIDATES
        share = sums + tl.program_id(1) * CANDIDATES
        sum_above(x_row, vocab, peak, temperature, state, near_scores + row * MOST_NEAR, share, TILE)
        if is_last_of(arrivals, row, programs):
            top_p = tl.load(top_ps + row)
            token, is_sure = choose_candidate(programs, top_p, state, near_tokens + row * MOST_NEAR, sums, PROGRAMS)
            tl.store(state + TOKEN, token)
            if is_sure:
                tl.store(state + PHASE, DONE)
            else:
                _cut_whole_row(x_row, vocab, peak, temperature, top_p, state, depths)
    if phase == BRACKET:
        peak, low, high = float_of(tl.load(state + PEAK)), tl.load(state + LOW), tl.load(state + HIGH)
        temperature = tl.maximum(tl.load(temperatures + row), 1e-30)
        x_row = logits + row.to(tl.int64) * row_stride
        depths += row.to(tl.int64) * most_listed
        mass = tl.zeros((TILE,), tl.int64)
        above = tl.zeros((TILE,), tl.int32)
        least, most = row * 0 + _DEEPEST, row * 0
        for tile in range(tl.program_id(1), tl.cdiv(vocab, TILE), programs):
            token = tile * TILE + tl.arange(0, TILE)
            x = tl.load(x_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            scores = scaled_scores(x, peak, temperature)
            bins, depth = bin_of(scores), depth_of(scores)
            is_above = bins < low
            is_within = (bins >= low) & (bins <= high) & (token < vocab)
            above += is_above.to(tl.int32)
            mass += tl.where(is_above, fixed_mass(scores), 0)
            num_within = tl.sum(is_within.to(tl.int32))
            if num_within > 0:
                least = tl.minimum(least, tl.min(tl.where(is_within, depth, _DEEPEST)))
                most = tl.maximum(most, tl.max(tl.where(is_within, depth, 0)))
                place = tl.atomic_add(listed + row, num_within, sem="relaxed")
                place += tl.cumsum(is_within.to(tl.int32)) - 1
                tl.store(depths + place, depth, mask=is_within & (place < most_listed))
        share = row * programs + tl.program_id(1)
        tl.store(masses + share, tl.sum(mass))
        tl.store(ranges + share * 3, tl.sum(above))
        tl.store(ranges + share * 3 + 1, least)
        tl.store(ranges + share * 3 + 2, most)
        if is_last_of(arrivals, row, programs):
            _settle(
                x_row, vocab, programs, peak, temperature, listed + row, state, row, top_ks, top_ps, top_p_firsts,
                min_keeps, masses + row * programs, ranges + row * programs * 3, depths, most_listed, PROGRAMS,
            )  # fmt: skip


@triton.jit
def _settle(
    x_row, vocab, programs, peak, temperature, listed, state, row, top_ks, top_ps, top_p_firsts, min_keeps,
    masses, ranges, depths, most_listed, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Finds the score of the row's cut, and lets what lies at or above it race."""
    top_k, top_p, min_keep = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_keeps + row)
    has_k = (top_k > 0) & (top_k < vocab)
    has_p = top_p < 1
    cuts_twice = has_k & has_p & (tl.load(top_p_firsts + row) == 0)
    floor = float_of(tl.load(state + FLOOR))
    share = tl.arange(0, PROGRAMS)
    is_one = share < programs
    mass = tl.sum(tl.load(masses + share, mask=is_one, other=0, cache_modifier=".cg"))
    above = tl.sum(tl.load(ranges + share * 3, mask=is_one, other=0, cache_modifier=".cg"))
    least = tl.min(tl.load(ranges + share * 3 + 1, mask=is_one, other=_DEEPEST, cache_modifier=".cg"))
    most = tl.max(tl.load(ranges + share * 3 + 2, mask=is_one, other=0, cache_modifier=".cg"))
    # At once, for all threads: loaded by each and then cleared by one, some warps would find it cleared already.
    num_listed = tl.atomic_xchg(listed, 0, sem="relaxed")
    k = tl.where(has_k, top_k, vocab)
    target = tl.load(state + TOTAL).to(tl.float64) * top_p.to(tl.float64)
    min_keep = tl.where(has_p, min_keep, vocab)
    if num_listed <= most_listed:
        depth = _cut(
            depths, num_listed, x_row, peak, temperature, floor, least, most, mass, above, target, top_p, min_keep, k,
            vocab, cuts_twice, True,
        )  # fmt: skip
    else:
        depth = _cut(
            depths, vocab, x_row, peak, temperature, floor, least, most, mass, above, target, top_p, min_keep, k,
            vocab, cuts_twice, False,
        )  # fmt: skip
    tl.store(state + FLOOR, bits_of(tl.maximum(floor, score_at(depth))))
    tl.store(state + PHASE, RACE)


@triton.jit
def _cut_whole_row(x_row, vocab, peak, temperature, top_p, state, depths):
    """:func:`_settle` for a nucleus of which nothing is known: slow, and rarely needed."""
    mass = tl.zeros((_WIDE,), tl.int64)
    for start in range(0, vocab, _WIDE):
        mass += fixed_mass(score_at(_depths_from(start, depths, vocab, x_row, peak, temperature, False, _WIDE)))
    nothing = vocab * 0
    depth = _cut_depth(
        depths, vocab, x_row, peak, temperature, nothing, nothing + _DEEPEST, nothing.to(tl.int64), nothing,
        tl.sum(mass).to(tl.float64) * top_p.to(tl.float64), nothing + 1, vocab, False, False,
    )  # fmt: skip
    tl.store(state + FLOOR, bits_of(score_at(depth)))
    tl.store(state + PHASE, RACE)


@triton.jit
def _cut(
    depths, length, x_row, peak, temperature, floor, least, most, mass_above, num_above, target, top_p, min_keep, k,
    vocab, cuts_twice, IS_LISTED: tl.constexpr,
):  # fmt: skip
    """The depth at which a row's filters cut: :func:`_cut_depth`; with ``cuts_twice`` first by ``k`` alone, then by
    ``top_p`` of the mass that this leaves, in which case nothing lies above ``least``."""
    depth = most
    for cut in range(1 + cuts_twice.to(tl.int32)):
        if cut == 1:
            kept = tl.zeros((_WIDE,), tl.int64)
            for start in range(0, length, _WIDE):
                own = _depths_from(start, depths, length, x_row, peak, temperature, IS_LISTED, _WIDE)
                scores = score_at(own)
                kept += tl.where((own <= depth) & (scores >= floor), fixed_mass(scores), 0)
            target = tl.sum(kept).to(tl.float64) * top_p.to(tl.float64)
        is_last = cut == cuts_twice.to(tl.int32)
        depth = _cut_depth(
            depths, length, x_row, peak, temperature, least, depth, mass_above, num_above, target,
            tl.where(is_last, min_keep, vocab), k, is_last, IS_LISTED,
        )  # fmt: skip
    return depth


@triton.jit
def _cut_depth(
    depths, length, x_row, peak, temperature, least, most, mass_above, num_above, target, min_keep, k, may_drop,
    IS_LISTED: tl.constexpr,
):  # fmt: skip
    """The least depth down to which there are ``k`` tokens, or ``min_keep`` tokens of a mass of ``target``; ``most`` if
    none less.

    Each round counts down to the edges of equal parts of what is left, and then leaves no more than the depths that
    there are: few, where logits are coarse.  ``mass_above`` and ``num_above``: of what lies above ``least``.  Depths
    come from the list, or from the logits of the whole row.  ``may_drop``: the list need not stay as it is.
    """
    low, high = least, most
    ways = tl.arange(0, _WAYS)
    while low < high:
        step = (high - low) // _WAYS + 1
        edges = low + step * (ways + 1) - 1
        mass = tl.zeros((_WAYS, _PIECE), tl.int64)
        count = tl.zeros((_WAYS, _PIECE), tl.int32)
        for start in range(0, length, _PIECE):
            depth = _depths_from(start, depths, length, x_row, peak, temperature, IS_LISTED, _PIECE)
            is_counted = (depth >= least) & (start + tl.arange(0, _PIECE) < length)
            own = fixed_mass(score_at(depth))
            is_upto = is_counted[None, :] & (depth[None, :] <= edges[:, None])
            count += is_upto.to(tl.int32)
            mass += tl.where(is_upto, own[None, :], 0)
        total = (mass_above + tl.sum(mass, 1)).to(tl.float64)
        found = num_above + tl.sum(count, 1)
        is_enough = ((total >= target) & (found >= min_keep)) | (found >= k)
        low += step * tl.sum((~is_enough).to(tl.int32))
        high = tl.minimum(high, low + step - 1)
        if low < high:
            drops = may_drop & IS_LISTED
            first, last = tl.full((_WIDE,), _DEEPEST, tl.int32), tl.zeros((_WIDE,), tl.int32)
            passed, passed_mass = tl.zeros((_WIDE,), tl.int32), tl.zeros((_WIDE,), tl.int64)
            left = length * 0
            for start in range(0, length, _WIDE):
                depth = _depths_from(start, depths, length, x_row, peak, temperature, IS_LISTED, _WIDE)
                is_real = start + tl.arange(0, _WIDE) < length
                is_left = (depth >= low) & (depth <= high) & is_real
                first = tl.minimum(first, tl.where(is_left, depth, _DEEPEST))
                last = tl.maximum(last, tl.where(is_left, depth, 0))
                if drops:
                    is_passed = (depth >= least) & (depth < low) & is_real
                    passed += is_passed.to(tl.int32)
                    passed_mass += tl.where(is_passed, fixed_mass(score_at(depth)), 0)
                    place = left + tl.cumsum(is_left.to(tl.int32)) - 1
                    tl.debug_barrier()  # all have read this part before any of it is overwritten
                    tl.store(depths + place, depth, mask=is_left)
                    left += tl.sum(is_left.to(tl.int32))
            if drops:
                tl.debug_barrier()
                length = left
                mass_above += tl.sum(passed_mass)
                num_above += tl.sum(passed)
            low, high = tl.min(first), tl.max(last)
            least = tl.where(drops, low, least)
    return low


@triton.jit
def _depths_from(start, depths, length, x_row, peak, temperature, IS_LISTED: tl.constexpr, WIDTH: tl.constexpr):
    lane = start + tl.arange(0, WIDTH)
    if IS_LISTED:
        depth = tl.load(depths + lane, mask=lane < length, other=_DEEPEST)
    else:
        x = tl.load(x_row + lane, mask=lane < length, other=float("-inf")).to(tl.float32)
        depth = depth_of(scaled_scores(x, peak, temperature))
    return depth
