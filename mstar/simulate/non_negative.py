"""Least squares with no negative part, and without what single outliers would make of it."""

from __future__ import annotations

import numpy as np

ROUNDS = 8  # of weighing outliers down: other work on the machine makes single steps slow
OUTLIER = 3.0  # times the median error
_LEAST = 1e-12  # of a scaled column: below it a part is none


def fit_relative(columns: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least squared relative error of ``columns @ x``, outliers weighed down (Huber's weights).

    Args:
        columns: float64 [n, parts], none negative.
        measured: float64 [n], all positive.

    Returns:
        float64 [parts].
    """
    relative = columns / measured[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    relative = relative / scale
    target = np.ones(measured.size)
    solution = non_negative(relative, target)
    for _ in range(ROUNDS):
        errors = np.abs(relative @ solution - 1)
        bound = OUTLIER * max(float(np.median(errors)), 1e-3)
        root = np.sqrt(np.minimum(1.0, bound / np.maximum(errors, bound)))
        solution = non_negative(relative * root[:, None], target * root)
    return solution / scale


def non_negative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least ``|columns @ x - target|``: the active-set method of Lawson and Hanson (1974)."""
    count = columns.shape[1]
    solution, in_use = np.zeros(count), np.zeros(count, bool)
    for _ in range(3 * count):
        gain = columns.T @ (target - columns @ solution)
        gain[in_use] = 0
        if gain.max() <= _LEAST * target.size:
            break
        in_use[gain.argmax()] = True
        solution = _within(columns, target, solution, in_use)
    return solution


def _within(columns: np.ndarray, target: np.ndarray, solution: np.ndarray, in_use: np.ndarray) -> np.ndarray:
    """The best solution of the parts ``in_use`` [parts], less those that leave on the way there from ``solution``."""
    while True:
        best = np.zeros(solution.size)
        best[in_use] = np.linalg.lstsq(columns[:, in_use], target, rcond=None)[0]
        leaves = in_use & (best <= _LEAST)
        if not leaves.any():
            return best
        way = solution[leaves] / np.maximum(solution[leaves] - best[leaves], 1e-300)
        solution = solution + way.min() * (best - solution)
        in_use &= solution > _LEAST
        solution = np.where(in_use, solution, 0.0)
