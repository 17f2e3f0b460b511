"""How many wait and run over time: means, maxima, and a bounded number of points to draw."""

from __future__ import annotations

import numpy as np

MOST_POINTS = 4_096


class Timeline:
    """Levels that hold from one call to the next.

    Of the points every ``_stride``-th is kept; the stride doubles whenever there would be too many.
    """

    def __init__(self) -> None:
        self.max_queued = 0
        self._stride = 1
        self._calls = 0
        self._points: list[tuple[int, int, int]] = []
        self._last = (0, 0, 0)
        self._start_ns = 0
        self._queued_area = 0
        self._running_area = 0

    def add(self, now_ns: int, num_queued: int, num_running: int) -> None:
        """From now on so many wait and run."""
        then, queued, running = self._last
        if not self._calls:
            self._start_ns = then = now_ns
        self._queued_area += queued * (now_ns - then)
        self._running_area += running * (now_ns - then)
        self._last = (now_ns, num_queued, num_running)
        self.max_queued = max(self.max_queued, num_queued)
        if self._calls % self._stride == 0:
            self._points.append(self._last)
            if len(self._points) > MOST_POINTS:
                self._points, self._stride = self._points[::2], self._stride * 2
        self._calls += 1

    @property
    def mean_queued(self) -> float:
        return self._queued_area / max(self._last[0] - self._start_ns, 1)

    @property
    def mean_running(self) -> float:
        return self._running_area / max(self._last[0] - self._start_ns, 1)

    def points(self) -> np.ndarray:
        """int64 [n, 3]: time in nanoseconds, waiting, running."""
        return np.array(self._points, np.int64).reshape(-1, 3)
