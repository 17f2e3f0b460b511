"""An engine that notes every step it runs: to fit a cost model, and to compare a simulation with the real thing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mstar.engine.batch import Batch, StepResult
from mstar.engine.in_flight import InFlight
from mstar.simulate.composition import Composition, StepRows, rows_of
from mstar.simulate.engine import KV


class RecordedStep(NamedTuple):
    """A step that ran: of each row its request, its new tokens and those stored before.  ``num_prompts``: the last
    rows, which brought tokens of their prompts."""

    walk: str
    request_ids: tuple[int, ...]
    spans: tuple[int, ...]
    stored: tuple[int, ...]
    num_prompts: int

    def compose(self) -> Composition:
        """As a cost model sees it."""
        return StepRows(np.array(self.spans), np.array(self.stored), self.num_prompts).compose()


class RecordingEngine:
    """Passes everything on to an engine with a paged cache.

    ``steps``: those that ran, in order; ``step_ms``: of each, the time from the call that launched it to the end of the
    one that collected it, which is the step's own if no other is in flight.
    """

    def __init__(self, engine: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` tells seconds."""
        self._clock = clock
        self.steps: list[RecordedStep] = []
        self.step_ms: list[float] = []
        self._engine = engine
        self._launched: dict[int, tuple[int, float]] = {}  # by the step's id: its place, and when it was launched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def launch(self, batch: Batch) -> InFlight:
        rows = np.array([info.row for info in batch.infos], np.int64)
        found = rows_of(batch, self._engine.resources[KV].stored_len[rows])
        start = self._clock()
        in_flight = self._engine.launch(batch)
        if in_flight.request_ids:
            self._launched[id(in_flight)] = (len(self.steps), start)
            spans, stored = tuple(found.spans.tolist()), tuple(found.stored.tolist())
            self.steps.append(RecordedStep(batch.graph_walk, batch.request_ids, spans, stored, found.num_prompts))
            self.step_ms.append(0.0)
        return in_flight

    def collect(self, in_flight: InFlight) -> StepResult:
        result = self._engine.collect(in_flight)
        place, start = self._launched.pop(id(in_flight))
        self.step_ms[place] = (self._clock() - start) * 1e3
        return result
