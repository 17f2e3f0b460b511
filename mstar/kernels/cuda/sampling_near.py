"""The few best tokens of a row, and the whole draw from them where the filters keep no others."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.sampling_rules import NO_TOKEN, depth_of, fixed_mass, neg_log_noise, scaled_scores

MOST_NEAR = tl.constexpr(4096)  # tokens of a row's list
MOST_CLOSE = tl.constexpr(4096)  # chunks that they may come from
FEW = tl.constexpr(256)
_MANY, _MOST = tl.constexpr(1024), tl.constexpr(2048)
_PAIRS = tl.constexpr(4096)  # of tokens, compared at once

# Distances from the peak by octave, 16 bins each, from 2**-16 to 2**16.
_BINS = tl.constexpr(512)
_FIRST_BIN = tl.constexpr((127 - 16) << 4)


@triton.jit
def _distance_bin(distance):
    bits = distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(tl.maximum((bits >> 19) - _FIRST_BIN, 0), _BINS - 1)


@triton.jit
def collect_near(
    x_row, vocab, num_chunks, top, peak, temperature, wanted, close, scores, tokens,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lists at least ``wanted`` best tokens of a row (or all), in order of their ids; returns their number, or -1
    where they are too many.

    Every token as near to the peak as the worst of them is listed too.  ``top`` fp32 [CHUNKS] are the maxima of
    chunks of tokens: where ``wanted`` chunks have a token that near, there are ``wanted`` tokens, and others have
    none.  ``close`` int32 [MOST_CLOSE], ``scores`` fp32 and ``tokens`` int32 [MOST_NEAR]: of this row.
    """
    chunk = tl.arange(0, CHUNKS)
    is_real = chunk < num_chunks
    bins = _distance_bin(peak - top)
    limit = tl.sum((tl.cumsum(tl.histogram(bins, _BINS, mask=is_real)) < wanted).to(tl.int32))
    is_close = is_real & (bins <= limit)
    num_close = tl.sum(is_close.to(tl.int32))
    found = num_close * 0 - 1
    if num_close <= MOST_CLOSE:
        tl.store(close + tl.cumsum(is_close.to(tl.int32)) - 1, chunk, mask=is_close)
        tl.debug_barrier()
        found = num_close * 0
        for start in range(0, num_close, TILE // CHUNK):
            lane = start + tl.arange(0, TILE // CHUNK)
            first = tl.load(close + lane, mask=lane < num_close, other=0) * CHUNK
            token = first[:, None] + tl.arange(0, CHUNK)[None, :]
            is_token = (lane < num_close)[:, None] & (token < vocab)
            x = tl.load(x_row + token, mask=is_token, other=0.0).to(tl.float32)
            is_near = is_token & (_distance_bin(peak - x) <= limit)
            in_chunk = tl.sum(is_near.to(tl.int32), 1)
            before = found + tl.cumsum(in_chunk) - in_chunk
            place = before[:, None] + tl.cumsum(is_near.to(tl.int32), 1) - 1
            is_kept = is_near & (place < MOST_NEAR)
            tl.store(scores + place, scaled_scores(x, peak, temperature), mask=is_kept)
            tl.store(tokens + place, token, mask=is_kept)
            found += tl.sum(in_chunk)
        tl.debug_barrier()
        found = tl.where(found > MOST_NEAR, -1, found)
        if found > _MANY:
            found = _shorten(scores, tokens, found, wanted)
    return found


@triton.jit
def _shorten(scores, tokens, found, wanted):
    """Leaves what the ``wanted`` best of the ``found`` listed tokens need: as the list, but by counting tokens, where
    chunks told less.  Returns their number, or -1 where they are too many to draw from."""
    lane = tl.arange(0, MOST_NEAR)
    is_real = lane < found
    score = tl.load(scores + lane, mask=is_real, other=float("-inf"))
    token = tl.load(tokens + lane, mask=is_real, other=0)
    bins = _distance_bin(score)
    limit = tl.sum((tl.cumsum(tl.histogram(bins, _BINS, mask=is_real)) < wanted).to(tl.int32))
    is_kept = is_real & (bins <= limit)
    place = tl.cumsum(is_kept.to(tl.int32)) - 1
    tl.debug_barrier()
    tl.store(scores + place, score, mask=is_kept)
    tl.store(tokens + place, token, mask=is_kept)
    tl.debug_barrier()
    left = tl.sum(is_kept.to(tl.int32))
    return tl.where(left > _MOST, -1, left)


@triton.jit
def draw_among(
    scores, masses, tokens, count, vocab, k, has_k, top_p, min_keep, floor, low_total, high_total, has_total,
    seed, offset, WIDTH: tl.constexpr,
):  # fmt: skip
    """:func:`draw_near` from a list of at most ``WIDTH``, few enough to find each token's rank and the mass above it
    from all pairs.

    ``low_total`` and ``high_total``, float64: between which the total mass lies.  Where they differ, what is drawn is
    the row's only if it would be by either.
    """
    lane = tl.arange(0, WIDTH)
    is_real = lane < count
    score = tl.load(scores + lane, mask=is_real, other=float("-inf"))
    token = tl.load(tokens + lane, mask=is_real, other=0)
    mass = fixed_mass(score)
    tl.store(masses + lane, mass, mask=is_real)
    tl.debug_barrier()
    share = top_p.to(tl.float64)
    # Where all of the list has less than the nucleus and nothing lies under the floor, no token of it is cut away.
    could_cut = tl.sum(mass).to(tl.float64) >= tl.where(top_p < 1, low_total * share, 0.0)
    could_cut |= tl.min(tl.where(is_real, score, 0.0)) < floor
    others = tl.where(has_k | (count == vocab) | could_cut, count, 0)
    rank = tl.zeros((WIDTH, _PAIRS // WIDTH), tl.int32)  # tokens above each one
    above = tl.zeros((WIDTH, _PAIRS // WIDTH), tl.int64)  # and their mass
    for start in range(0, others, _PAIRS // WIDTH):
        other = start + tl.arange(0, _PAIRS // WIDTH)
        other_score = tl.load(scores + other, mask=other < others, other=float("-inf"))
        other_mass = tl.load(masses + other, mask=other < others, other=0)
        is_above = other_score[None, :] > score[:, None]
        rank += is_above.to(tl.int32)
        above += tl.where(is_above, other_mass[None, :], 0)
    rank, above = tl.sum(rank, 1), tl.sum(above, 1).to(tl.float64)
    is_kept = is_real & (score >= floor) & (rank < k)
    own_total = tl.sum(tl.where(is_kept, mass, 0)).to(tl.float64)
    low = tl.where(top_p < 1, tl.where(has_total, low_total, own_total) * share, float("inf"))
    high = tl.where(top_p < 1, tl.where(has_total, high_total, own_total) * share, float("inf"))
    in_nucleus = (above < high) | (rank < min_keep)
    is_unsure = (above >= low) & (rank >= min_keep)
    # Something of the list is cut away: then nothing that is not listed can be kept.
    is_cut = is_real & ~(in_nucleus & (score >= floor))
    is_settled = has_k | (count == vocab) | (could_cut & (tl.sum(is_cut.to(tl.int32)) > 0))
    is_kept = is_kept & in_nucleus
    result = tl.where(is_kept, score + neg_log_noise(seed, offset, token), float("-inf"))
    winner = tl.where(is_kept & (result == tl.max(result)), token * 2 + is_unsure.to(tl.int32), NO_TOKEN)
    winner = tl.min(winner)
    return winner >> 1, is_settled & (winner % 2 == 0)


@triton.jit
def draw_near(
    scores, masses, tokens, count, vocab, k, has_k, top_p, min_keep, floor, total, has_total, seed, offset,
):  # fmt: skip
    """Filters and draws from the list of :func:`collect_near`.

    Args:
        masses: room for int64 [MOST_NEAR].
        k: tokens that top-k keeps; where ``has_k``, the list has that many.
        top_p: of ``total`` where ``has_total``, else of the mass of what top-k and ``floor``, that of min-p, keep.

    Returns:
        The token, and whether it is the row's: False where tokens off the list may be kept too.
    """
    if count <= FEW:
        of_all = total.to(tl.float64)
        winner, is_settled = draw_among(
            scores, masses, tokens, count, vocab, k, has_k, top_p, min_keep, floor, of_all, of_all, has_total, seed,
            offset, FEW,
        )  # fmt: skip
    else:
        winner, is_settled = _draw_among_many(
            scores, tokens, count, vocab, k, has_k, top_p, min_keep, floor, total, has_total, seed, offset
        )
    return winner, is_settled


@triton.jit
def _draw_among_many(
    scores, tokens, count, vocab, k, has_k, top_p, min_keep, floor, total, has_total, seed, offset,
):  # fmt: skip
    """:func:`draw_near` from a list of at most ``_MOST``, by search for the score at which the filters cut."""
    lane = tl.arange(0, _MOST)
    is_real = lane < count
    score = tl.load(scores + lane, mask=is_real, other=float("-inf"))
    token = tl.load(tokens + lane, mask=is_real, other=0)
    mass, depth = fixed_mass(score), depth_of(score)
    target = tl.where(top_p < 1, total.to(tl.float64) * top_p.to(tl.float64), float("inf"))
    cuts_twice = has_k & (top_p < 1) & (has_total == 0)
    high = tl.max(tl.where(is_real, depth, 0))
    for cut in range(1 + cuts_twice.to(tl.int32)):
        if cut == 1:
            is_kept = is_real & (depth <= high) & (score >= floor)
            target = tl.sum(tl.where(is_kept, mass, 0)).to(tl.float64) * top_p.to(tl.float64)
        by_mass = (top_p < 1) & (cut == cuts_twice.to(tl.int32))
        low = high * 0
        while low < high:
            middle = low + (high - low) // 2
            is_upto = is_real & (depth <= middle)
            num_upto = tl.sum(is_upto.to(tl.int32))
            is_enough = has_k & (num_upto >= k)
            if by_mass:
                upto = tl.sum(tl.where(is_upto, mass, 0)).to(tl.float64)
                is_enough |= (upto >= target) & (num_upto >= min_keep)
            high = tl.where(is_enough, middle, high)
            low = tl.where(is_enough, low, middle + 1)
    is_kept = is_real & (depth <= high) & (score >= floor)
    is_settled = has_k | (count == vocab) | (tl.sum(is_kept.to(tl.int32)) < count)
    result = tl.where(is_kept, score + neg_log_noise(seed, offset, token), float("-inf"))
    winner = tl.min(tl.where(is_kept & (result == tl.max(result)), token, NO_TOKEN))
    return winner, is_settled
