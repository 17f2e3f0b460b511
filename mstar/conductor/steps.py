"""A step's way from launch to landing, and what happens when it cannot run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mstar.conductor.batching import Pick
from mstar.conductor.counters import Counters
from mstar.conductor.departures import Departures
from mstar.conductor.lanes import Lane
from mstar.conductor.pressure import Pressure
from mstar.conductor.protocols import StepEngine
from mstar.conductor.report import Outbox
from mstar.conductor.request import FinishReason
from mstar.conductor.rows import IDLE, RowTable
from mstar.conductor.transitions import DONE, Transitions
from mstar.engine.in_flight import InFlight
from mstar.engine.resources.step import AdmitOutcome, AdmitRuntimeError
from mstar.utils.errors import EngineFault, Unavailable

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Flight:
    """A launched step: the rows that run and the requests they belonged to, int64 [n].

    ``is_last`` bool [n]: no step of the row follows; None where that is true of nobody.  ``is_partial`` bool [n]: more
    of the row's prompt follows, so what it drew is nothing; None likewise.  ``handle`` is None when nothing runs: then
    ``refused`` or ``errors`` says why.  ``num_left``: departures before the launch.  ``is_settled``: there is nothing
    (more) to be done about what could not run.  ``prompt_tokens`` it brings in all; ``launched_ns``: when, where
    somebody times steps.
    """

    rows: np.ndarray
    request_ids: np.ndarray
    num_left: int
    is_last: np.ndarray | None = None
    is_partial: np.ndarray | None = None
    handle: InFlight | None = None
    refused: AdmitOutcome | None = None
    errors: Mapping[int, Exception] = field(default_factory=dict)
    is_settled: bool = True
    prompt_tokens: int = 0
    launched_ns: int = 0

    @property
    def drawing_rows(self) -> np.ndarray:
        """Rows whose draw is their next token, int64."""
        return self.rows if self.is_partial is None else self.rows[~self.is_partial]


class Steps:
    """Launches picks, and deals with those that could not run.

    A row's state moves on at the launch, from counts alone, so the next step may be launched before this one lands.
    """

    def __init__(
        self,
        engine: StepEngine,
        table: RowTable,
        transitions: Transitions,
        departures: Departures,
        pressure: Pressure,
        counters: Counters,
        outbox: Outbox,
    ) -> None:
        self._engine = engine
        self._pressure = pressure
        self._table = table
        self._transitions = transitions
        self._departures = departures
        self._counters = counters
        self._outbox = outbox
        self._clock = engine.clock
        # The very array of rows that was launched last, and launches of it to come in which no row ends.
        self._launched_last: tuple[np.ndarray | None, int] = (None, 0)

    def launch(self, pick: Pick) -> Flight:
        """Hands the pick to the engine and moves its rows on.  :meth:`settle` what it could not run."""
        flight = Flight(pick.rows, pick.request_ids, self._table.num_left)
        self._clock.mark("schedule")
        try:
            handle = self._engine.launch(pick.batch)
        except Exception as error:
            log.exception("%s/%s: a step of %d rows failed", pick.batch.node, pick.batch.graph_walk, pick.rows.size)
            flight.errors = dict.fromkeys(pick.batch.request_ids, error)
            flight.is_settled = False
            return flight
        flight.refused, flight.errors = handle.refused, handle.errors
        flight.is_settled = bool(handle.request_ids) and not handle.errors
        if handle.request_ids:
            prompt_tokens = pick.prompt_tokens
            if len(handle.request_ids) != pick.rows.size:  # some rows failed or were skipped
                flight.request_ids = np.array(handle.request_ids, np.int64)
                ran = np.isin(pick.request_ids, flight.request_ids)
                flight.rows = pick.rows[ran]
                prompt_tokens = None if prompt_tokens is None else prompt_tokens[ran]
            flight.handle = handle
            if prompt_tokens is not None:
                self._bring(flight, prompt_tokens)
            self._advance(flight, pick.lane)
            self._outbox.add_launch(flight.rows.size)
        self._clock.mark("routing")
        return flight

    def _bring(self, flight: Flight, prompt_tokens: np.ndarray) -> None:
        """``prompt_tokens`` int64 [n] of the rows' prompts are on their way."""
        bring = prompt_tokens.nonzero()[0]
        rows, tokens = flight.rows[bring], prompt_tokens[bring]
        self._table.bring(rows, tokens)
        flight.prompt_tokens = int(tokens.sum())
        if np.count_nonzero(self._table.prompt_left[rows]):
            flight.is_partial = self._table.prompt_left[flight.rows] > 0

    def _advance(self, flight: Flight, lane: Lane) -> None:
        table, rows = self._table, flight.drawing_rows
        table.launched(rows)
        if len(lane.states) == 1 and self._transitions.repeats(lane.states[0]):
            table.rounds.raise_by_one(rows)
            launched, quiet = self._launched_last
            if launched is rows and quiet:
                self._launched_last = rows, quiet - 1
            else:
                self._advance_in_place(flight, lane.states[0])
            return
        self._launched_last = None, 0
        rounds = table.rounds.values
        states, rounds[rows] = self._transitions.advance(table.state[rows], rounds[rows])
        is_last = (table.issued.values[rows] >= table.limit[rows]) | (states == DONE)
        states[is_last] = IDLE
        table.move(rows, states)
        if not np.count_nonzero(is_last):
            return
        if flight.is_partial is not None:
            flight.is_last = np.zeros(flight.rows.size, bool)
            flight.is_last[~flight.is_partial] = is_last
        else:
            flight.is_last = is_last

    def _advance_in_place(self, flight: Flight, state: int) -> None:
        """Rows that stay in their state until they are done; also finds how long all of them go on."""
        table, rows = self._table, flight.rows
        left = np.minimum(
            table.limit[rows] - table.issued.values[rows],
            self._transitions.rounds_left(state, table.rounds.values[rows]),
        )
        quiet = int(left.min())
        if quiet > 0:
            self._launched_last = rows, quiet - 1
            return
        self._launched_last = None, 0
        flight.is_last = left <= 0
        table.move(rows[flight.is_last], IDLE)

    def settle(self, flight: Flight) -> None:
        """Deals with what a launch could not run, once no earlier step is in flight."""
        flight.is_settled = True
        if flight.errors:
            self._departures.fail_all(flight.errors)
        if flight.refused is not None and flight.handle is None:
            self._hold_back(flight, flight.refused)

    def _hold_back(self, flight: Flight, outcome: AdmitOutcome) -> None:
        """After a refused admission: the newest rows sit out until somebody leaves; the oldest goes on.

        Reservations make this rare.  Half of the rows are held at a time, so a step is tried again soon; when not
        even one row fits and nobody else can run, one request gives its pages up (:class:`Pressure`), or ends.
        """
        self._counters.refused_admissions += 1
        table, reason = self._table, outcome.reason
        rows = flight.rows[table.request_id[flight.rows] == flight.request_ids]
        if isinstance(reason, AdmitRuntimeError):
            to_blame = rows[table.request_id[rows] == reason.request_id]
            for row in (to_blame if reason.request_id >= 0 else rows).tolist():
                self._departures.fail(row, EngineFault(reason.message))
            return
        if outcome.ok or table.num_left != flight.num_left:  # not ready yet, or there is more room now: ask again
            return
        newest_last = rows[np.argsort(table.request_id[rows])]
        table.hold(newest_last[rows.size // 2 :])
        running = np.flatnonzero(table.state != IDLE)
        if not table.is_held[running].all():
            return
        if running.size == 1:
            self._departures.end(int(running[0]), FinishReason.LENGTH)
            return
        if self._pressure.give_way(running):
            return
        newest = int(running[np.argmax(table.request_id[running])])
        self._departures.fail(newest, Unavailable("the KV cache is exhausted"))
