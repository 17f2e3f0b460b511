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
from mstar.simulate.host_costs import HostStep


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

    Of each step that ran, in order: ``uses``: how many steps in a row had the same batch before it; ``step_ms``: the
    time from the call that launched it to the end of the one that collected it, which is the step's own if no other is
    in flight; ``wait_ms``: the time that the latter took.  ``landed``: places of those that were collected, in that
    order.  Only what must be noted at the launch is, for its time counts as the host's.
    """

    def __init__(
        self,
        engine: Any,
        clock: Callable[[], float] = time.perf_counter,
        on_launch: Callable[[], None] = lambda: None,
    ) -> None:
        """``clock`` tells seconds.  ``on_launch`` is called before each launch."""
        self._clock = clock
        self._on_launch = on_launch
        self._engine = engine
        self._last_batch: Batch | None = None
        self._launched: dict[int, tuple[int, float]] = {}  # by the step's id: its place, and when it was launched
        self.clear()

    def clear(self) -> None:
        """Forgets all steps, when none is in flight."""
        assert not self._launched, "a step is in flight"
        self._noted: list[tuple[Batch, StepRows]] = []
        self.uses: list[int] = []
        self.step_ms: list[float] = []
        self.wait_ms: list[float] = []
        self.landed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def steps(self) -> list[RecordedStep]:
        """Those that ran, in order."""
        return [
            RecordedStep(
                batch.graph_walk, batch.request_ids, tuple(of.spans.tolist()), tuple(of.stored.tolist()), of.num_prompts
            )
            for batch, of in self._noted
        ]

    def composition(self, place: int) -> Composition:
        """A step as the cost model sees it."""
        return self._noted[place][1].compose()

    def host_step(self, place: int) -> HostStep:
        """As the host's costs see it."""
        rows = self._noted[place][1]
        return HostStep(rows.spans.size, rows.num_prompts, self.uses[place])

    def launch(self, batch: Batch) -> InFlight:
        rows = np.array([info.row for info in batch.infos], np.int64)
        found = rows_of(batch, self._engine.resources[KV].stored_len[rows])
        self._on_launch()
        start = self._clock()
        in_flight = self._engine.launch(batch)
        if in_flight.request_ids:
            self._launched[id(in_flight)] = (len(self._noted), start)
            self._noted.append((batch, found))
            self.uses.append(self.uses[-1] + 1 if self.uses and batch is self._last_batch else 0)
            self.step_ms.append(0.0)
            self.wait_ms.append(0.0)
            self._last_batch = batch
        return in_flight

    def collect(self, in_flight: InFlight) -> StepResult:
        place, launched = self._launched.pop(id(in_flight))
        start = self._clock()
        result = self._engine.collect(in_flight)
        end = self._clock()
        self.step_ms[place] = (end - launched) * 1e3
        self.wait_ms[place] = (end - start) * 1e3
        self.landed.append(place)
        return result
