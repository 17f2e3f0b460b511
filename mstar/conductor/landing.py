"""What a step brought: counted, checked, reported row by row, once it has come to the host."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from mstar.conductor import faults, row_logprobs
from mstar.conductor.counters import Counters
from mstar.conductor.departures import Departures
from mstar.conductor.protocols import StepEngine
from mstar.conductor.report import Named, Outbox, PromptLogprobs, named
from mstar.conductor.request import NO_TOKEN, FinishReason
from mstar.conductor.rows import RowTable
from mstar.conductor.steps import Flight
from mstar.conductor.stops import Ends, StopCheck
from mstar.engine.batch import StepResult

log = logging.getLogger(__name__)


class Landing:
    """Turns what lands into a report's rows."""

    def __init__(
        self,
        engine: StepEngine,
        table: RowTable,
        stops: StopCheck,
        departures: Departures,
        counters: Counters,
        outbox: Outbox,
    ) -> None:
        self._engine = engine
        self._table = table
        self._stops = stops
        self._departures = departures
        self._counters = counters
        self._outbox = outbox
        self._clock = engine.clock
        self._running = np.zeros(table.request_id.size, np.uint8)  # finish of rows that all go on
        self._running.flags.writeable = False
        self._named_last: tuple[np.ndarray | None, Named | None] = (None, None)  # of the very array of rows it names

    def land(self, flight: Flight) -> None:
        """Waits for the step's tokens; counts, checks and reports each row whose request is still there."""
        assert flight.handle is not None
        self._clock.mark("schedule")
        try:
            result = self._engine.collect(flight.handle)
        except Exception as error:
            log.exception("a step of %d rows failed as it was collected", flight.rows.size)
            self._departures.fail_all(dict.fromkeys(flight.request_ids.tolist(), error))
            return
        if result.errors:
            self._departures.fail_all(result.errors)
        rows, ids, is_last, is_partial = flight.rows, flight.request_ids, flight.is_last, flight.is_partial
        if len(result.request_ids) != rows.size:
            came = np.isin(ids, np.array(result.request_ids, np.int64))
            rows, ids = rows[came], ids[came]
            is_last, is_partial = _those(is_last, came), _those(is_partial, came)
        if not rows.size:
            return
        tokens, fault = result.host["new_token"], result.host.get("fault")
        counts: np.ndarray | None = None
        has_left = self._table.num_left != flight.num_left
        if has_left or is_partial is not None or (fault is not None and np.count_nonzero(fault)):
            counts = self._sort_out(rows, ids, fault, result, is_partial)
            if np.count_nonzero(counts) == counts.size:  # others have left
                counts = None
            else:
                rows, tokens, is_last = rows[counts], tokens[counts], _those(is_last, counts)
        if rows.size:
            self._report(_Landed(rows, tokens, is_last, result, counts))
        self._clock.mark("post_process")

    def _sort_out(
        self,
        rows: np.ndarray,
        ids: np.ndarray,
        fault: np.ndarray | None,
        result: StepResult,
        is_partial: np.ndarray | None,
    ) -> np.ndarray:
        """Which rows count, bool [n]: not those whose request has left, nor those of which more of the prompt follows,
        nor broken ones, whose request ends here."""
        counts = self._table.request_id[rows] == ids
        has_left = ~counts
        if is_partial is not None:
            self._hear_prompts(rows[counts & is_partial], result)
            has_left &= ~is_partial
            counts &= ~is_partial
        self._counters.discarded_tokens += int(np.count_nonzero(has_left))
        if fault is not None:
            broken = (counts & (fault != 0)).nonzero()[0]
            codes = faults.codes_of(fault[broken], self._table.is_constrained[rows[broken]])
            num_constrained = np.count_nonzero(codes == faults.NOTHING_LEFT)
            self._counters.constraint_faults += num_constrained
            self._counters.row_faults += broken.size - num_constrained
            for row, code in zip(rows[broken].tolist(), codes.tolist(), strict=True):
                self._departures.fail(row, faults.error_of(code, int(self._table.generated.values[row]) + 1))
            counts[broken] = False
        return counts

    def _report(self, landed: _Landed) -> None:
        """Rows whose requests are there, at least one."""
        table = self._table
        table.landed(landed.rows)
        ends = self._stops.check(table, landed.rows, landed.tokens, landed.is_last)
        if ends is not None and ends.is_broken is not None:
            landed, ends = self._without_broken(landed, ends, ends.is_broken)
            if not landed.rows.size:
                return
        rows, tokens = landed.rows, landed.tokens
        if table.asks_prompt.count:
            self._tell_prompts(landed)
        if table.asks_logprobs.count:
            self._tell_logprobs(landed, None if ends is None else ends.shown)
        names = self._named(rows)
        if ends is None:
            self._outbox.add_step(names, tokens.astype(np.int32), self._running[: rows.size])
            self._keep(rows, tokens)
            return
        self._outbox.add_step(names, ends.shown, ends.finish)
        if np.count_nonzero(ends.is_output) < rows.size:
            self._keep(rows[ends.is_output], tokens[ends.is_output])
        else:
            self._keep(rows, tokens)
        ended = ends.finish.nonzero()[0]
        for row, reason in zip(rows[ended].tolist(), ends.finish[ended].tolist(), strict=True):
            self._departures.leave(row, FinishReason(reason))

    def _without_broken(self, landed: _Landed, ends: Ends, is_broken: np.ndarray) -> tuple[_Landed, Ends]:
        """Fails the rows whose grammar did not take their token; the others are left."""
        for row in landed.rows[is_broken].tolist():
            reason = self._engine.reason_of(row)
            if reason:
                self._counters.constraint_faults += 1
            else:
                self._counters.row_faults += 1
            self._departures.fail(row, faults.broken_grammar(reason))
        good = ~is_broken
        return landed.only(good), Ends(ends.shown[good], ends.finish[good], ends.is_output[good], None)

    def _tell_logprobs(self, landed: _Landed, shown: np.ndarray | None) -> None:
        """``shown``: what stands for each token in the report; a stop id of the request may count as output there."""
        table = self._table
        told = table.asks_logprobs.values[landed.rows]
        if shown is not None:
            told &= shown != NO_TOKEN
        places = told.nonzero()[0]
        if places.size:
            num_top = table.num_logprobs[landed.rows[places]]
            records = row_logprobs.of_tokens(landed.result.host, landed.in_host(places), num_top)
            self._outbox.add_logprobs(places, records)

    def _hear_prompts(self, rows: np.ndarray, result: StepResult) -> None:
        """Keeps what a step told of the prompts of those rows int64 [n] that asked."""
        table = self._table
        for row in rows[table.asks_prompt.values[rows]].tolist() if table.asks_prompt.count else ():
            request_id = int(table.request_id[row])
            records = row_logprobs.of_prompt(result.outputs.get(request_id, {}), int(table.num_prompt_logprobs[row]))
            table.heard.setdefault(row, []).append(records)

    def _tell_prompts(self, landed: _Landed) -> None:
        """Of rows that asked, what this step and those before it told of their prompts: with the first token."""
        table = self._table
        rows = landed.rows[table.asks_prompt.values[landed.rows]]
        self._hear_prompts(rows, landed.result)
        for row in rows.tolist():
            heard = table.heard.pop(row)
            records = heard[0] if len(heard) == 1 else np.concatenate(heard)
            self._outbox.add_prompt_logprobs(PromptLogprobs(int(table.client[row]), int(table.ticket[row]), records))
            table.asks_prompt.write(row, False)

    def _named(self, rows: np.ndarray) -> Named:
        """Whom the rows belong to; a step's array of rows never changes hands."""
        last, names = self._named_last
        if last is not rows or names is None:
            table = self._table
            names = named(table.request_id[rows], table.client[rows], table.ticket[rows])
            self._named_last = rows, names
        return names

    def _keep(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        self._counters.generated_tokens += tokens.size
        self._table.record(rows, tokens)
        self._clock.mark("post_process")
        self._engine.extend_prefix_chains(rows, tokens)
        self._clock.mark("chains")


class _Landed(NamedTuple):
    """Rows of a step that count, every array [n].

    ``result`` is what all rows of the step brought, ``counts`` bool [all rows] which of them count; None: all.
    """

    rows: np.ndarray
    tokens: np.ndarray
    is_last: np.ndarray | None
    result: StepResult
    counts: np.ndarray | None

    def in_host(self, places: np.ndarray) -> np.ndarray:
        """Where the rows at ``places`` stand in the step's host arrays."""
        return places if self.counts is None else self.counts.nonzero()[0][places]

    def only(self, good: np.ndarray) -> _Landed:
        """Those where ``good`` bool [n] is true."""
        places = self.in_host(np.arange(good.size))[good]
        counts = np.zeros(len(self.result.request_ids), bool)
        counts[places] = True
        return _Landed(self.rows[good], self.tokens[good], _those(self.is_last, good), self.result, counts)


def _those(mask: np.ndarray | None, chosen: np.ndarray) -> np.ndarray | None:
    return None if mask is None else mask[chosen]
