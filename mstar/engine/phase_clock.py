"""Where a step's host time goes: one clock that every part of the loop marks as it finishes."""

from __future__ import annotations

from collections import Counter
from time import perf_counter_ns

PHASES = ("declare", "admit", "plan", "preprocess", "stage", "replay", "commit", "collect")


class PhaseClock:
    """Adds the time since the last mark to the phase that just ended, so the phases add up to the time in between.

    ``nanoseconds`` and ``marks`` by phase.  The engine marks :data:`PHASES`; whoever drives it adds its own.
    """

    def __init__(self) -> None:
        self.nanoseconds: Counter[str] = Counter()
        self.marks: Counter[str] = Counter()
        self._last = perf_counter_ns()

    @property
    def seconds(self) -> dict[str, float]:
        """Time of every phase so far, in order of first appearance."""
        return {name: spent / 1e9 for name, spent in self.nanoseconds.items()}

    def start(self) -> None:
        """Begins anew here: the time since the last mark belongs to no phase."""
        self._last = perf_counter_ns()

    def mark(self, name: str) -> None:
        """Phase ``name`` has just ended."""
        now = perf_counter_ns()
        self.nanoseconds[name] += now - self._last
        self.marks[name] += 1
        self._last = now

    def reset(self) -> None:
        """Forgets all phases and begins anew."""
        self.nanoseconds.clear()
        self.marks.clear()
        self.start()


class NoClock(PhaseClock):
    """Marks nothing, at the price of an empty call."""

    def start(self) -> None:
        pass

    def mark(self, name: str) -> None:
        pass


NO_CLOCK = NoClock()
