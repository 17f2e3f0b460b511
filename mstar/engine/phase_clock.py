"""Where a step's host time goes: one clock that every part of the loop marks as it finishes."""

from __future__ import annotations

from time import perf_counter_ns

PHASES = ("declare", "admit", "plan", "preprocess", "stage", "replay", "commit", "collect")


class PhaseClock:
    """Adds the time since the last mark to the phase that just ended, so the phases add up to the time in between.

    The engine marks :data:`PHASES`; whoever drives it adds its own.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[int]] = {}  # by phase: nanoseconds, marks
        self._last = perf_counter_ns()

    @property
    def nanoseconds(self) -> dict[str, int]:
        """Time of every phase so far, in order of first appearance."""
        return {name: spent for name, (spent, _) in self._entries.items()}

    @property
    def marks(self) -> dict[str, int]:
        """How often each phase has ended."""
        return {name: marks for name, (_, marks) in self._entries.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """:attr:`nanoseconds` in seconds."""
        return {name: spent / 1e9 for name, (spent, _) in self._entries.items()}

    def start(self) -> None:
        """Begins anew here: the time since the last mark belongs to no phase."""
        self._last = perf_counter_ns()

    def mark(self, name: str) -> None:
        """Phase ``name`` has just ended."""
        now = perf_counter_ns()
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = [0, 0]
        entry[0] += now - self._last
        entry[1] += 1
        self._last = now

    def reset(self) -> None:
        """Forgets all phases and begins anew."""
        self._entries.clear()
        self.start()


class NoClock(PhaseClock):
    """Marks nothing, at the price of an empty call."""

    def start(self) -> None:
        pass

    def mark(self, name: str) -> None:
        pass


NO_CLOCK = NoClock()
