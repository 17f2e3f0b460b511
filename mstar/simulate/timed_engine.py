"""An engine that notes how large its steps are and how long the device has them, at next to no cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mstar.engine.batch import Batch, StepResult
from mstar.engine.in_flight import InFlight
from mstar.simulate.composition import StepSize, size_of


class TimedEngine:
    """Passes everything on to an engine.

    ``steps``: those that ran and were collected, in order, each with the nanoseconds from its launch, or from when the
    one before was collected if that is later, until it was collected itself: so their sum is the time in which any step
    was under way, as far as the host knows.
    """

    def __init__(self, engine: Any, clock: Callable[[], int]) -> None:
        """``clock`` tells nanoseconds."""
        self.steps: list[tuple[StepSize, int]] = []
        self._engine = engine
        self._clock = clock
        self._launched: dict[int, tuple[StepSize, int]] = {}  # by the step's id: its size, and when it was launched
        self._last_ns = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def launch(self, batch: Batch) -> InFlight:
        launched_ns = self._clock()
        in_flight = self._engine.launch(batch)
        if in_flight.request_ids:
            self._launched[id(in_flight)] = size_of(batch), launched_ns
        return in_flight

    def collect(self, in_flight: InFlight) -> StepResult:
        result = self._engine.collect(in_flight)
        now_ns = self._clock()
        size, launched_ns = self._launched.pop(id(in_flight))
        self.steps.append((size, now_ns - max(launched_ns, self._last_ns)))
        self._last_ns = now_ns
        return result
