"""A step's time on the device from its composition: a sum of non-negative parts, fitted to measured steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mstar.simulate.buckets import UNPADDED, Buckets
from mstar.simulate.composition import Composition
from mstar.simulate.non_negative import fit_relative

# A further token costs the less or the more the more there are: until a device's units are full it may cost nothing,
# and for a single one there may be kernels of its own.  So each of these ranges has a price of its own.
RANGES = tuple(pairwise((1, 2, 16, 64, 256, 1 << 60)))
# Of a row of one token it matters how long it is until there are enough of its tokens for several programs to share.
DEPTH = 256
# Of a step: itself; each of its tokens, by range; each row; each token attended to by a row of one token; each that
# such a row attends to on average, up to DEPTH; having a prompt; each token of a step that has one; each pair of a
# prompt's token and one it attends to.  Rows and tokens are those of the step's bucket.
PARTS = (
    "step", *(f"token_from_{low}" for low, _ in RANGES), "row", "context_token", "row_depth",
    "prompt_step", "prompt_step_token", "prompt_pair",
)  # fmt: skip


class FitError(NamedTuple):
    """Of predicted steps, relative to their measured time; ``bias`` is the mean, with its sign."""

    steps: int
    median: float
    p95: float
    bias: float


def fit_error(predicted: np.ndarray, measured: np.ndarray) -> FitError:
    """Of float64 [n] each, in one unit."""
    relative = predicted / measured - 1
    size = np.abs(relative)
    return FitError(size.size, float(np.median(size)), float(np.quantile(size, 0.95)), float(relative.mean()))


@dataclass(frozen=True)
class CostModel:
    """Milliseconds for one of each of :data:`PARTS`, and the sizes to which steps are padded."""

    parts_ms: tuple[float, ...]
    buckets: Buckets = UNPADDED

    def step_ms(self, step: Composition) -> float:
        """What a step takes on the device."""
        base, *of_range, row, context_token, row_depth, prompt_step, prompt_step_token, pair = self.parts_ms
        rows, tokens = self.buckets.pad(step)
        milliseconds = base + row * rows + context_token * step.decode_context
        if step.decode_rows:
            milliseconds += row_depth * min(step.decode_context / step.decode_rows, DEPTH)
        for (low, high), token in zip(RANGES, of_range, strict=True):
            if tokens <= low:
                break
            milliseconds += token * (min(tokens, high) - low)
        if step.prompt_rows:
            milliseconds += prompt_step + prompt_step_token * tokens + pair * step.prompt_pairs
        return milliseconds

    def errors(self, steps: Mapping[str, np.ndarray], measured_ms: np.ndarray) -> FitError:
        """How far the prediction is from ``measured_ms`` [n]; ``steps``: columns of the compositions."""
        return fit_error(_parts(steps, self.buckets) @ np.array(self.parts_ms), measured_ms)


def fit(steps: Mapping[str, np.ndarray], measured_ms: np.ndarray, buckets: Buckets = UNPADDED) -> CostModel:
    """The non-negative parts with the least squared relative error.

    Args:
        steps: columns of the compositions, int64 [n] each.
        measured_ms: float64 [n], all positive.
        buckets: those of the engine that was measured.

    Raises:
        ValueError: no steps.
    """
    if not measured_ms.size:
        raise ValueError("a cost model needs at least one measured step")
    return CostModel(tuple(fit_relative(_parts(steps, buckets), measured_ms).tolist()), buckets)


def _parts(steps: Mapping[str, np.ndarray], buckets: Buckets) -> np.ndarray:
    """float64 [n, parts]"""
    rows, tokens = buckets.pad_all(steps)
    has_prompt = steps["prompt_rows"] > 0
    parts = (
        np.ones(rows.size),
        *(np.clip(tokens, low, high) - low for low, high in RANGES),
        rows,
        steps["decode_context"],
        np.minimum(steps["decode_context"] / np.maximum(steps["decode_rows"], 1), DEPTH),
        has_prompt,
        has_prompt * tokens,
        steps["prompt_pairs"],
    )
    return np.stack(parts, axis=1).astype(np.float64)
