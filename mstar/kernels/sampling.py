"""One draw per row of logits: filters as thresholds on scaled logits, then an exponential race.

The rule is exact and depends on a row's logits, settings, seed and offset alone, so neither its neighbours nor its
place in the batch changes a row's token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from mstar.kernels.philox import philox_words

MAX_NOISE = np.float32(22.9)  # -log E of the smallest word is 22.88: no token makes up for more
MIN_NOISE = -2.82  # and of the largest word it is -2.81
FIRST_TOP = 128  # largest logits looked at before the nucleus is known to need more
NOT_FINITE, NOTHING_LEFT = 1, 2  # faults of a row
_CHUNK = 8192  # candidates whose words are made at once: the arrays stay in a core's cache

# A token's mass, exp(score), as a whole number of 2**-40: sums are exact, so no order of summation moves a nucleus.
MASS_BITS = 40
MIN_SCORE = -43.0  # has no mass left
LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.4286068203094172e-06
EXP_TERMS = tuple(1 / math.factorial(power) for power in range(10, -1, -1))


class RowSettings(NamedTuple):
    """How each of ``B`` rows is drawn; all arrays [B].  ``temperature`` 0 or ``top_k`` 1 is greedy; ``top_k`` 0,
    ``top_p`` 1 and ``min_p`` 0 are off."""

    temperature: torch.Tensor  # float32
    top_k: torch.Tensor  # int64
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    top_p_first: torch.Tensor  # bool
    top_p_min_keep: torch.Tensor  # int64
    seed: torch.Tensor  # int64
    offset: torch.Tensor  # int64, draws this row has kept so far


# (x, rows, best, settings of those rows, apply_filters) -> tokens, as :func:`draw_rows` does it.
Draw = Callable[[torch.Tensor, np.ndarray, np.ndarray, RowSettings, bool], np.ndarray]


def draw_rows(
    x: torch.Tensor, rows: np.ndarray, best: np.ndarray, settings: RowSettings, apply_filters: bool
) -> np.ndarray:
    """Scales, filters and draws ``rows`` of ``x``.

    Args:
        x: fp32 [B, V] on the CPU.
        rows, best: int64 [R], the rows to draw and the token of each one's maximum, which is finite.
        settings: of those rows [R], on the CPU.

    Returns:
        Tokens int64 [R].
    """
    index = torch.from_numpy(rows)
    scores = scaled_scores(x[index], x[index, torch.from_numpy(best)], settings.temperature)
    floor = keep_floor(scores, settings, apply_filters)
    return race(scores, floor, settings.seed.numpy(), settings.offset.numpy(), best)


def sample_rows(
    logits: torch.Tensor,
    settings: RowSettings,
    apply_filters: bool,
    draw: Draw = draw_rows,
    *,
    is_constrained: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row; reads values on the host.

    Order: greedy rows take the lowest id of the maximum; others are scaled by their temperature, then min-p, then
    top-k and top-p (both on the full distribution where ``top_p_first``), then the draw.  Ties at a cut are all
    kept, and so is at least one token.

    Args:
        logits: [B, V], any float dtype; -inf bars a token.
        apply_filters: False leaves top-k and top-p out.
        draw: how the rows that are not greedy are drawn.
        is_constrained: tokens may have been barred for a request's sake, so that a row of -inf alone is
            ``NOTHING_LEFT``; otherwise it is ``NOT_FINITE``, as a row with a NaN or a +inf always is.

    Returns:
        tokens int64 [B], and faults int8 [B]: 0 or what is wrong with a row, whose token is 0 then.
    """
    x = logits.float()
    host = x.numpy(force=True)
    best = host.argmax(-1)  # the first maximum, or the first NaN
    peak = host[np.arange(best.size), best]
    is_fault = ~np.isfinite(peak)
    tokens = np.where(is_fault, 0, best)
    is_greedy = settings.temperature.numpy(force=True) == 0
    if apply_filters:
        is_greedy |= settings.top_k.numpy(force=True) == 1
    rows = np.flatnonzero(~is_greedy & ~is_fault)
    if rows.size:
        index = torch.from_numpy(rows)
        chosen = RowSettings(*(column.cpu()[index] for column in settings))
        tokens[rows] = draw(x.cpu(), rows, best[rows], chosen, apply_filters)
    faults = is_fault.view(np.int8)  # True is NOT_FINITE
    if is_constrained:
        faults[peak == -np.inf] = NOTHING_LEFT
    device = logits.device
    # Copied even to the CPU: into memory that a graph's later operators may count on.
    return torch.from_numpy(tokens).to(device, copy=True), torch.from_numpy(faults).to(device, copy=True)


def kept_probabilities(logits: torch.Tensor, settings: RowSettings, apply_filters: bool) -> torch.Tensor:
    """The distribution that :func:`sample_rows` draws from, float64 [B, V]; 0 for what is filtered out.

    ``logits`` [B, V] on the CPU, of rows without a fault.
    """
    x = logits.float()
    peak = x.max(-1).values
    scores = scaled_scores(x, peak, settings.temperature)
    floor = keep_floor(scores, settings, apply_filters)
    kept = torch.where(scores >= floor[:, None], scores.double(), -torch.inf).softmax(-1)
    is_greedy = (settings.temperature == 0) | (apply_filters & (settings.top_k == 1))
    first = torch.nn.functional.one_hot(x.argmax(-1), x.shape[1]).double()
    return torch.where(is_greedy[:, None], first, kept)


def scaled_scores(x: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``(x - peak) / temperature``, fp32 [R, V]: log-probabilities but for a constant per row; at most 0, never NaN.

    ``peak`` fp32 [R] is each row's maximum; ``temperature`` is clamped at 1e-30.
    """
    return (x - peak[:, None]).div_(temperature.clamp(min=1e-30)[:, None])


def keep_floor(scores: torch.Tensor, settings: RowSettings, apply_filters: bool) -> torch.Tensor:
    """The score from which a row's tokens are kept, fp32 [R]; -inf keeps every token.

    ``scores`` as :func:`scaled_scores` gives them.  Every filter keeps the tokens above some score, ties included,
    so the kept set is known by its lowest score.
    """
    floor = settings.min_p.log()
    vocab = scores.shape[-1]
    has_k = apply_filters & (settings.top_k > 0) & (settings.top_k < vocab)
    has_p = apply_filters & (settings.top_p < 1)
    rows = torch.nonzero(has_k | has_p).squeeze(-1)
    if rows.numel() == 0:
        return floor
    k = torch.where(has_k, settings.top_k, vocab)[rows]
    looked = max(int(k[k < vocab].max()) if bool(has_k.any()) else 0, FIRST_TOP if bool(has_p.any()) else 0)
    scores, base = scores[rows], floor[rows]
    largest = torch.topk(scores, min(looked, vocab), dim=-1).values
    cut = torch.where(k < vocab, _at_rank(largest, k.clamp(max=largest.shape[1])), -torch.inf)
    if bool(has_p.any()):
        base = torch.where(settings.top_p_first[rows], base, torch.maximum(base, cut))
        top_p, min_keep = settings.top_p[rows], settings.top_p_min_keep[rows]
        p_floor = _top_p_floor(scores, largest, base, top_p, min_keep)
        cut = torch.maximum(cut, torch.where(top_p < 1, p_floor, -torch.inf))
    floor[rows] = torch.maximum(floor[rows], cut)
    return floor


def _top_p_floor(
    scores: torch.Tensor, largest: torch.Tensor, base: torch.Tensor, top_p: torch.Tensor, min_keep: torch.Tensor
) -> torch.Tensor:
    """The lowest score of each row's nucleus [R]: a token is in it iff the mass strictly above it is less than
    ``top_p`` of the mass at or above ``base``, or fewer than ``min_keep`` tokens lie above it.

    ``largest`` [R, any number]: each row's largest scores, sorted.  More of them are looked at where the nucleus
    needs it, since a sort of the whole row costs far more.
    """
    vocab = scores.shape[-1]
    target = torch.where(scores >= base[:, None], fixed_mass(scores), 0).sum(-1).double() * top_p.double()
    floor = torch.full_like(base, -torch.inf)
    pending = torch.nonzero(top_p < 1).squeeze(-1)
    largest = largest[pending]
    while True:
        looked = largest.shape[1]
        own = fixed_mass(largest)
        above = (own.cumsum(-1) - own).double()
        kept = torch.maximum((above < target[pending, None]).sum(-1), min_keep[pending]).clamp(1, vocab)
        # The mass at or above the base is all there is: what lies past it can't be in the nucleus.
        found = (kept < looked) | (largest[:, -1] < base[pending]) | (looked == vocab)
        floor[pending[found]] = _at_rank(largest[found], kept[found].clamp(max=looked))
        pending = pending[~found]
        if pending.numel() == 0:
            return floor
        looked = min(vocab, max(looked * 8, int(min_keep[pending].max().clamp(max=vocab))))
        largest = torch.topk(scores[pending], looked, dim=-1).values


def fixed_mass(scores: torch.Tensor) -> torch.Tensor:
    """``exp(scores) * 2**40`` rounded to int64, for fp32 scores of at most 0.

    Plain double operations in a fixed order, none of them fused: a kernel that does the same has the same bits.
    """
    s = scores.clamp(min=MIN_SCORE).double()
    n = s.mul(LOG2_E).add_(0.5).floor_()
    r = s.sub_(n * LN2_HIGH).sub_(n * LN2_LOW)
    y = torch.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        y.mul_(r).add_(term)
    power = n.long().add_(1023 + MASS_BITS).bitwise_left_shift_(52).view(torch.float64)
    return y.mul_(power).round_().long()


def _at_rank(largest: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """The ``rank``-th (from 1) of each row's sorted values: [R, n], [R] -> [R]."""
    return largest.gather(1, rank[:, None] - 1).squeeze(1)


def race(
    scores: torch.Tensor, floor: torch.Tensor, seed: np.ndarray, offset: np.ndarray, best: np.ndarray
) -> np.ndarray:
    """Exponential race: each kept token's score minus the log of its noise; the largest wins, the lowest id on ties.

    Only tokens that can still win are given noise: noise adds at most ``MAX_NOISE``, so whatever lies further below
    the best token's own result is out.  The result is that of the race over all tokens.

    Args:
        scores: fp32 [R, V], at most 0; floor: fp32 [R]; tokens below it, or at -inf, never win.
        seed, offset: int64 [R]; best: int64 [R], a token of each row with score 0.

    Returns:
        int64 [R].
    """
    certain = neg_log_noise(seed, offset, best)
    cut = torch.maximum(floor, torch.from_numpy(certain - MAX_NOISE))
    vocab = scores.shape[1]
    flat = np.flatnonzero((scores >= cut[:, None]).numpy())
    rows = flat // vocab
    results = scores.view(-1).numpy()[flat]
    for start in range(0, flat.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        row = rows[part]
        results[part] += neg_log_noise(seed[row], offset[row], flat[part] - row * vocab)
    return flat[first_best(results, np.bincount(rows, minlength=scores.shape[0]))] % vocab


def first_best(results: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Where the first maximum of each row lies in ``results``, whose rows of ``counts`` [R] >= 1 entries follow one
    another; int64 [R]."""
    starts = np.cumsum(counts) - counts
    winners = np.flatnonzero(results == np.repeat(np.maximum.reduceat(results, starts), counts))
    return winners[np.searchsorted(winners, starts)]


def neg_log_noise(seed: np.ndarray, offset: np.ndarray, token: np.ndarray) -> np.ndarray:
    """``-log E`` with ``E`` the exponential noise of (seed, offset, token), fp32 [n], in -2.81 .. 22.88.

    ``v = min((word + 0.5) * 2**-32, 1 - 2**-24)`` in fp32, ``E = -log1p(-v)``: fine near 0, where winners lie.
    """
    words = torch.from_numpy(philox_words(seed, offset, token).astype(np.float32))
    v = words.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_().numpy()
