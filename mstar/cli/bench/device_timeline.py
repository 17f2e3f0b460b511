"""When the device began and ended each replay: CUDA events that the engine's phase clock records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mstar.cli.bench.engine_run import MESSAGE
from mstar.engine.phase_clock import PhaseClock

STAGED, REPLAYED = "stage", "replay"  # the phases that end right before a replay is submitted, and right after


@dataclass(frozen=True)
class Replays:
    """Milliseconds on the device's clock since the first replay began, and the iteration that submitted each; [n]."""

    starts: np.ndarray
    ends: np.ndarray
    iterations: np.ndarray

    def within(self, iterations: slice) -> Replays:
        """Those submitted in a range of iterations."""
        chosen = (self.iterations >= iterations.start) & (self.iterations < iterations.stop)
        return Replays(self.starts[chosen], self.ends[chosen], self.iterations[chosen])

    @property
    def step_ms(self) -> float:
        """Median from the end of one replay to the end of the next."""
        return _median(np.diff(self.ends))

    @property
    def replay_ms(self) -> float:
        return _median(self.ends - self.starts)

    @property
    def gap_us(self) -> float:
        """Median from the end of one replay to the start of the next: what the stream waits or copies in between."""
        return _median(self.starts[1:] - self.ends[:-1]) * 1e3


class DeviceTimeline(PhaseClock):
    """Records an event before and after each replay on the current stream, while it is switched on.

    The events cost the host a few microseconds a step, so it is off at first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self._spare: list[torch.cuda.Event] = []
        self._begun: torch.cuda.Event | None = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []
        self._iteration = 0

    def mark(self, name: str) -> None:
        if not self.is_on:
            return
        super().mark(name)
        if name == STAGED:
            self._begun = self._record()
        elif name == REPLAYED and self._begun is not None:
            self._spans.append((self._begun, self._record(), self._iteration))
            self._begun = None
        elif name == MESSAGE:
            self._iteration += 1

    def switch_on(self) -> None:
        """Begins anew, with the next iteration as number 0."""
        self.reset()
        self._begun, self._iteration, self.is_on = None, 0, True

    def switch_off(self) -> Replays:
        """Waits for the device and hands out what was recorded."""
        self.is_on = False
        torch.cuda.synchronize()
        spans, self._spans = self._spans, []
        if not spans:
            return Replays(np.empty(0), np.empty(0), np.empty(0, np.int64))
        origin = spans[0][0]
        starts = np.array([origin.elapsed_time(start) for start, _, _ in spans])
        ends = np.array([origin.elapsed_time(end) for _, end, _ in spans])
        self._spare += [event for start, end, _ in spans for event in (start, end)]
        return Replays(starts, ends, np.array([iteration for _, _, iteration in spans]))

    def _record(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if values.size else float("nan")
