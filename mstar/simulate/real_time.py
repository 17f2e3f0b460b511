"""Clocks by which a real engine plays a trace."""

from __future__ import annotations

import time


class WallClock:
    """Nanoseconds since some moment, as they pass."""

    def __call__(self) -> int:
        return time.monotonic_ns()

    def sleep(self, nanoseconds: int) -> None:
        """Returns so much later; at once if that is not positive."""
        time.sleep(max(nanoseconds, 0) / 1e9)


class CpuClock:
    """The nanoseconds of processor time that this process has taken, and those it would have slept.

    For steps that one thread computes on a machine that is busy with other things: what these take does not count.
    """

    def __init__(self) -> None:
        self._slept_ns = 0

    def __call__(self) -> int:
        return time.process_time_ns() + self._slept_ns

    def sleep(self, nanoseconds: int) -> None:
        """Makes it so much later, at once."""
        self._slept_ns += max(nanoseconds, 0)


RealClock = WallClock | CpuClock
