"""The rules of `kernels/penalties.py` on the CPU, in place: only the entries that a rule changes are touched."""

from __future__ import annotations

import numpy as np

from mstar.kernels.penalties import LEAST_FACTOR, MOST_FACTOR

_FIRST_LOOK = 1024  # columns in which nearly every row has a token that is no stop id


def apply_presence_penalty(x: np.ndarray, rows: np.ndarray, seen: np.ndarray, penalty: np.ndarray) -> None:
    """``rows`` int64 [n] of ``x`` fp32 [B, V]; ``seen`` bool [n, V]; ``penalty`` fp32 [n]."""
    vocab = x.shape[1]
    flat = np.flatnonzero(seen)
    of = flat // vocab
    _scale(x, rows[of], flat - of * vocab, penalty[of])


def apply_window_penalty(x: np.ndarray, rows: np.ndarray, recent: np.ndarray, penalty: np.ndarray) -> None:
    """``rows`` int64 [n] of ``x`` fp32 [B, V]; ``recent`` integers [n, W], -1 for none; ``penalty`` fp32 [n]."""
    vocab = x.shape[1]
    of, column = np.nonzero(recent >= 0)
    flat, count = np.unique(of * vocab + recent[of, column], return_counts=True)
    of = flat // vocab
    with np.errstate(over="ignore", under="ignore"):
        factor = penalty.astype(np.float64)[of] ** count
    _scale(x, rows[of], flat - of * vocab, np.clip(factor, LEAST_FACTOR, MOST_FACTOR).astype(np.float32))


def apply_length_floor(x: np.ndarray, rows: np.ndarray, stop_ids: np.ndarray) -> None:
    """``rows`` int64 [n] of ``x`` fp32 [B, V]; ``stop_ids`` int64 [S]."""
    index = rows[:, None], stop_ids
    before = x[index]
    x[index] = -np.inf
    spared = without_any(x, rows)
    if spared.size:
        x[rows[spared, None], stop_ids] = before[spared]


def without_any(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Which of ``rows`` int64 [n] of ``x`` fp32 [B, V] hold nothing above -inf.

    Looked for in stretches of growing width, since the first settles it nearly always.
    """
    pending, start, width = np.arange(rows.size), 0, _FIRST_LOOK
    while pending.size and start < x.shape[1]:
        has_any = (x[rows[pending], start : start + width] > -np.inf).any(-1)
        pending = pending[~has_any]
        start, width = start + width, width * 8
    return pending


def _scale(x: np.ndarray, rows: np.ndarray, ids: np.ndarray, factor: np.ndarray) -> None:
    """`penalties.scaled` of the entries at (rows, ids)."""
    before = x[rows, ids]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        after = np.where(before > 0, before / factor, before * factor)
    after = np.clip(after, -MOST_FACTOR, MOST_FACTOR)
    x[rows, ids] = np.where(np.isfinite(before), after, before)
