"""Third pass, for rows whose cut lies among many tokens: the exact score of the cut, among those of a few bins."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import release_dependents, wait_for_inputs
from mstar.kernels.cuda.sampling_rules import (
    BRACKET,
    FLOOR,
    HIGH,
    LOW,
    PEAK,
    PHASE,
    RACE,
    SETTINGS,
    STATE,
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
    temperatures, top_ks, top_ps, top_p_firsts, min_keeps, masses, ranges, depths, most_listed,
    TILE: tl.constexpr, PROGRAMS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs per row).

    Each program's share: ``masses`` int64 [rows, programs], the mass above the bins; ``ranges`` int32 [rows,
    programs, 3], the number of tokens above them, and the least and greatest depth in them.  ``depths`` int32 [rows,
    most_listed]: those in them, ``listed`` int32 [rows] of them, which is 0 again when the kernel ends.
    """
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row, programs = tl.program_id(0), tl.num_programs(1)
    state = states + row * STATE
    if tl.load(state + PHASE) == BRACKET:
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
    num_listed = tl.load(listed, cache_modifier=".cg")
    tl.store(listed, 0)
    k = tl.where(has_k, top_k, vocab)
    target = tl.load(state + TOTAL).to(tl.float64) * top_p.to(tl.float64)
    min_keep_now = tl.where(has_p & (cuts_twice == 0), min_keep, vocab)
    if num_listed <= most_listed:
        depth = _cut_depth(
            depths, num_listed, x_row, peak, temperature, least, most, mass, above, target, min_keep_now, k, True
        )
    else:
        depth = _cut_depth(
            depths, vocab, x_row, peak, temperature, least, most, mass, above, target, min_keep_now, k, False
        )
    if cuts_twice:
        kept = tl.zeros((_WIDE,), tl.int64)
        for start in range(0, vocab, _WIDE):
            token = start + tl.arange(0, _WIDE)
            x = tl.load(x_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            scores = scaled_scores(x, peak, temperature)
            kept += tl.where((depth_of(scores) <= depth) & (scores >= floor), fixed_mass(scores), 0)
        target = tl.sum(kept).to(tl.float64) * top_p.to(tl.float64)
        depth = _cut_depth(
            depths, vocab, x_row, peak, temperature, row * 0, depth, mass * 0, row * 0, target, min_keep, k, False
        )
    tl.store(state + FLOOR, bits_of(tl.maximum(floor, score_at(depth))))
    tl.store(state + PHASE, RACE)


@triton.jit
def _cut_depth(
    depths, length, x_row, peak, temperature, least, most, mass_above, num_above, target, min_keep, k,
    IS_LISTED: tl.constexpr,
):  # fmt: skip
    """The least depth down to which there are ``k`` tokens, or ``min_keep`` tokens of a mass of ``target``; ``most`` if
    none less.

    Each round counts down to the edges of equal parts of what is left, and then leaves no more than the depths that
    there are: few, where logits are coarse.  ``mass_above`` and ``num_above``: of what lies above ``least``.  Depths
    come from the list, or from the logits of the whole row.
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
            first, last = tl.full((_WIDE,), _DEEPEST, tl.int32), tl.zeros((_WIDE,), tl.int32)
            for start in range(0, length, _WIDE):
                depth = _depths_from(start, depths, length, x_row, peak, temperature, IS_LISTED, _WIDE)
                is_left = (depth >= low) & (depth <= high) & (start + tl.arange(0, _WIDE) < length)
                first = tl.minimum(first, tl.where(is_left, depth, _DEEPEST))
                last = tl.maximum(last, tl.where(is_left, depth, 0))
            low, high = tl.min(first), tl.max(last)
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
