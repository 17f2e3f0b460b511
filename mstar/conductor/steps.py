"""A step's way from launch to landing, and what happens when it cannot run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mstar.conductor.batching import Pick
from mstar.conductor.counters import Counters
from mstar.conductor.departures import Departures
from mstar.conductor.lanes import Lane
from mstar.conductor.protocols import StepEngine
from mstar.conductor.report import Outbox
from mstar.conductor.request import NO_TOKEN, FinishReason
from mstar.conductor.rows import IDLE, RowTable
from mstar.conductor.stops import StopCheck
from mstar.conductor.transitions import DONE, Transitions
from mstar.engine.in_flight import InFlight
from mstar.engine.resources.step import AdmitOutcome, AdmitRuntimeError
from mstar.utils.errors import EngineFault, Unavailable

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Flight:
    """A launched step: the rows that run and the requests they belonged to, int64 [n].

    ``is_last`` bool [n]: no step of the row follows.  ``handle`` is None when nothing runs: then ``refused`` or
    ``errors`` says why.  ``num_left``: departures before the launch.
    """

    rows: np.ndarray
    request_ids: np.ndarray
    num_left: int
    is_last: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    handle: InFlight | None = None
    refused: AdmitOutcome | None = None
    errors: Mapping[int, Exception] = field(default_factory=dict)


class Steps:
    """Launches picks, and turns what lands into a report's rows.

    A row's state moves on at the launch, from counts alone, so the next step may be launched before this one lands.
    """

    def __init__(
        self,
        engine: StepEngine,
        table: RowTable,
        transitions: Transitions,
        stops: StopCheck,
        departures: Departures,
        counters: Counters,
        outbox: Outbox,
    ) -> None:
        self._engine = engine
        self._table = table
        self._transitions = transitions
        self._stops = stops
        self._departures = departures
        self._counters = counters
        self._outbox = outbox
        self._clock = engine.clock

    def launch(self, pick: Pick) -> Flight:
        """Hands the pick to the engine and moves its rows on.  :meth:`settle` what it could not run."""
        flight = Flight(pick.rows, pick.request_ids, self._table.num_left)
        try:
            handle = self._engine.launch(pick.batch)
        except Exception as error:
            log.exception("%s/%s: a step of %d rows failed", pick.batch.node, pick.batch.graph_walk, pick.rows.size)
            flight.errors = dict.fromkeys(pick.batch.request_ids, error)
            return flight
        flight.refused, flight.errors = handle.refused, handle.errors
        if handle.request_ids:
            if len(handle.request_ids) != pick.rows.size:  # some rows failed or were skipped
                flight.request_ids = np.array(handle.request_ids, np.int64)
                flight.rows = np.array([self._table.row_of[each] for each in handle.request_ids], np.int64)
            flight.handle = handle
            self._advance(flight, pick.lane)
            self._outbox.add_launch(flight.rows.size)
        self._clock.mark("routing")
        return flight

    def _advance(self, flight: Flight, lane: Lane) -> None:
        table, rows = self._table, flight.rows
        issued = table.issued[rows] + 1
        table.issued[rows] = issued
        flight.is_last = issued >= table.limit[rows]
        if len(lane.states) == 1 and self._transitions.repeats(lane.states[0]):
            rounds = table.iteration[rows] + 1
            table.iteration[rows] = rounds
            flight.is_last |= self._transitions.is_done(lane.states[0], rounds)
            if np.count_nonzero(flight.is_last):
                table.move(rows[flight.is_last], IDLE)
            return
        states, table.iteration[rows] = self._transitions.advance(table.state[rows], table.iteration[rows])
        flight.is_last |= states == DONE
        states[flight.is_last] = IDLE
        table.move(rows, states)

    def land(self, flight: Flight) -> None:
        """Waits for the step's tokens; counts, checks and reports each row whose request is still there."""
        assert flight.handle is not None
        try:
            result = self._engine.collect(flight.handle)
        except Exception as error:
            log.exception("a step of %d rows failed as it was collected", flight.rows.size)
            self._departures.fail_all(dict.fromkeys(flight.request_ids.tolist(), error))
            return
        self._departures.fail_all(result.errors)
        rows, ids, is_last = flight.rows, flight.request_ids, flight.is_last
        if len(result.request_ids) != rows.size:
            came = np.isin(ids, np.array(result.request_ids, np.int64))
            rows, ids, is_last = rows[came], ids[came], is_last[came]
        if not rows.size:
            return
        tokens, fault = result.host["new_token"], result.host.get("fault")
        if self._table.num_left != flight.num_left or (fault is not None and np.count_nonzero(fault)):
            counts = self._sort_out(rows, ids, fault)
            rows, tokens, is_last = rows[counts], tokens[counts], is_last[counts]
            self._report(rows, ids[counts].tolist(), tokens, is_last)
        else:
            self._report(rows, result.request_ids, tokens, is_last)
        self._clock.mark("post_process")

    def _sort_out(self, rows: np.ndarray, ids: np.ndarray, fault: np.ndarray | None) -> np.ndarray:
        """Which rows count, bool [n]: not those whose request has left, nor broken ones, whose request ends here."""
        counts = self._table.request_id[rows] == ids
        self._counters.discarded_tokens += int(rows.size - counts.sum())
        if fault is not None:
            broken = rows[fault & counts]
            self._counters.row_faults += broken.size
            for row in broken.tolist():
                self._departures.fail(row, EngineFault("the model's logits are not finite"))
            counts &= ~fault
        return counts

    def _report(self, rows: np.ndarray, ids: Sequence[int], tokens: np.ndarray, is_last: np.ndarray) -> None:
        table = self._table
        table.generated[rows] += 1
        finish = self._stops.check(table, rows, tokens, is_last)
        shown, has_ended = tokens.astype(np.int32), np.count_nonzero(finish)
        if has_ended:
            is_output = finish != FinishReason.STOP
            shown[~is_output] = NO_TOKEN
            ids, tokens = table.request_id[rows[is_output]].tolist(), tokens[is_output]
        self._outbox.add_step(table.request_id[rows], table.client[rows], table.ticket[rows], shown, finish)
        self._counters.generated_tokens += tokens.size
        self._engine.extend_prefix_chains(ids, tokens)
        if has_ended:
            ended = np.flatnonzero(finish)
            for row, reason in zip(rows[ended].tolist(), finish[ended].tolist(), strict=True):
                self._departures.leave(row, FinishReason(reason))

    def settle(self, flight: Flight) -> None:
        """Deals with what a launch could not run, once no other step is in flight."""
        self._departures.fail_all(flight.errors)
        if flight.refused is not None and flight.handle is None:
            self._hold_back(flight, flight.refused)

    def _hold_back(self, flight: Flight, outcome: AdmitOutcome) -> None:
        """After a refused admission: the newest rows sit out until somebody leaves; the oldest goes on.

        Reservations make this rare.  Half of the rows are held at a time, so a step is tried again soon; when not
        even one row fits and nobody else can run, one request ends, which frees what it held.
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
        newest = int(running[np.argmax(table.request_id[running])])
        self._departures.fail(newest, Unavailable("the KV cache is exhausted"))
