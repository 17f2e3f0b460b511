"""Times between tokens, as many as there are, in a histogram of narrow bins."""

from __future__ import annotations

import math

import numpy as np

WIDTH = math.log(1.01)  # of a bin: a percentile is exact to 1%
LEAST_NS = 1_000
BINS = 2_400  # up to 6 hours


class GapHistogram:
    """Counts of nanoseconds on a logarithmic scale, and their sum and maximum."""

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)
        self.sum_ns = 0
        self.max_ns = 0

    def add(self, gaps_ns: np.ndarray) -> None:
        """int64 [n], none negative."""
        bins = np.log(np.maximum(gaps_ns, LEAST_NS) / LEAST_NS) / WIDTH
        self.counts += np.bincount(np.minimum(bins.astype(np.int64), BINS - 1), minlength=BINS)
        self.sum_ns += int(gaps_ns.sum())
        self.max_ns = max(self.max_ns, int(gaps_ns.max(initial=0)))

    def quantiles_ms(self, shares: tuple[float, ...]) -> list[float]:
        """The upper edges of the bins that hold them, no more than the maximum; NaN without any gap."""
        total = int(self.counts.sum())
        if not total:
            return [math.nan] * len(shares)
        places = np.searchsorted(np.cumsum(self.counts), [max(math.ceil(share * total), 1) for share in shares])
        edges = LEAST_NS * np.exp((places + 1) * WIDTH)
        return (np.minimum(edges, self.max_ns) / 1e6).tolist()
