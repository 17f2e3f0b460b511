"""A step's time from its composition: a sum of non-negative parts, fitted to measured steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mstar.simulate.composition import Composition

# Of a step: itself; its tokens up to FEW, for a device takes hardly longer for a few than for one until its units are
# full; each row; each token attended to by a row of one token; having a prompt; each of its tokens; each pair of them.
PARTS = ("step", "few_tokens", "rows", "context_tokens", "prompt_step", "prompt_tokens", "prompt_pairs")
FEW = 16
ROUNDS = 5  # of weighing outliers down: other work on the machine makes single steps slow
OUTLIER = 3.0  # times the median error


class FitError(NamedTuple):
    """Of predicted steps, relative to their measured time; ``bias`` is the mean, with its sign."""

    steps: int
    median: float
    p95: float
    bias: float


@dataclass(frozen=True)
class CostModel:
    """Milliseconds for one of each of :data:`PARTS`."""

    parts_ms: tuple[float, ...]

    def step_ms(self, step: Composition) -> float:
        """What a step takes on the device."""
        decode_rows, context, prompt_rows, prompt_tokens, pairs = step
        base, few, row, context_token, prompt_step, prompt_token, pair = self.parts_ms
        milliseconds = base + few * min(decode_rows + prompt_tokens, FEW) + row * (decode_rows + prompt_rows)
        milliseconds += context_token * context
        if prompt_rows:
            milliseconds += prompt_step + prompt_token * prompt_tokens + pair * pairs
        return milliseconds

    def errors(self, steps: Mapping[str, np.ndarray], measured_ms: np.ndarray) -> FitError:
        """How far the prediction is from ``measured_ms`` [n]; ``steps``: columns of the compositions."""
        relative = _parts(steps) @ np.array(self.parts_ms) / measured_ms - 1
        size = np.abs(relative)
        return FitError(size.size, float(np.median(size)), float(np.quantile(size, 0.95)), float(relative.mean()))


def fit(steps: Mapping[str, np.ndarray], measured_ms: np.ndarray) -> CostModel:
    """The non-negative parts with the least squared relative error.

    Args:
        steps: columns of the compositions, int64 [n] each.
        measured_ms: float64 [n], all positive.

    Raises:
        ValueError: no steps.
    """
    if not measured_ms.size:
        raise ValueError("a cost model needs at least one measured step")
    relative = _parts(steps) / measured_ms[:, None]
    weights = np.ones(measured_ms.size)
    solution = _non_negative(relative, weights)
    for _ in range(ROUNDS):
        errors = np.abs(relative @ solution - 1)
        bound = OUTLIER * max(float(np.median(errors)), 1e-3)
        weights = np.minimum(1.0, bound / np.maximum(errors, bound))
        solution = _non_negative(relative, weights)
    return CostModel(tuple(solution.tolist()))


def _non_negative(relative: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Least squares of ``relative @ x = 1`` for x >= 0: the best of the plain solutions over all subsets of parts.

    The optimum is the plain solution over those parts that are not 0 in it, so with so few parts all are tried.
    """
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    design = relative / scale * np.sqrt(weights)[:, None]
    target = np.sqrt(weights)
    best, least = np.zeros(design.shape[1]), float(target @ target)
    used = np.flatnonzero(design.any(axis=0)).tolist()
    for size in range(1, len(used) + 1):
        for subset in map(list, itertools.combinations(used, size)):
            found = np.linalg.lstsq(design[:, subset], target, rcond=None)[0]
            if (found < 0).any():
                continue
            left = design[:, subset] @ found - target
            if (loss := float(left @ left)) < least * (1 - 1e-9):
                least, best = loss, np.zeros(design.shape[1])
                best[subset] = found
    return best / scale


def _parts(steps: Mapping[str, np.ndarray]) -> np.ndarray:
    """float64 [n, parts]"""
    decode_rows, prompt_rows, prompt_tokens = steps["decode_rows"], steps["prompt_rows"], steps["prompt_tokens"]
    parts = (
        np.ones(decode_rows.size),
        np.minimum(decode_rows + prompt_tokens, FEW),
        decode_rows + prompt_rows,
        steps["decode_context"],
        prompt_rows > 0,
        prompt_tokens,
        steps["prompt_pairs"],
    )
    return np.stack(parts, axis=1).astype(np.float64)
