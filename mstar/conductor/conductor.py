"""Requests in, steps out: admission, queue, batching, stop rules, and what each step brought."""

from __future__ import annotations

import itertools
import logging

import numpy as np

from mstar.conductor.admission import Admission
from mstar.conductor.batching import Batcher
from mstar.conductor.configs import RequestConfigs
from mstar.conductor.counters import Counters
from mstar.conductor.pools import Pools
from mstar.conductor.protocols import ServedModel, StepEngine
from mstar.conductor.queue import Limits, Waiting, WaitQueue
from mstar.conductor.report import Failure, Outbox, StepReport
from mstar.conductor.request import NO_TOKEN, EngineRequest, FinishReason
from mstar.conductor.rows import RowTable
from mstar.conductor.stops import StopCheck
from mstar.conductor.transitions import DONE, Transitions
from mstar.engine.batch import Batch
from mstar.engine.resources.step import AdmitOutcome, AdmitRuntimeError
from mstar.graph import compile_walks
from mstar.utils.errors import EngineFault, ErrorCode, MstarError, Unavailable

log = logging.getLogger(__name__)


class Conductor:
    """Decides which requests run and which rows each step has.  One thread calls it.

    A request joins when a row and its pages are free, in order of arrival; it leaves at a step's end.  Every
    accepted request ends exactly once: in a report's rows, in its failures, or by :meth:`finish`.
    """

    def __init__(self, engine: StepEngine, model: ServedModel, limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()
        self.pools = Pools(engine.resources.values())
        self._engine = engine
        self._transitions = Transitions(compile_walks(model.walks), model.next_walk)
        self._batcher = Batcher(
            self._transitions.states,
            self._transitions.entry_state,
            [engine.max_batch_size(state.node, state.walk) for state in self._transitions.states],
            limits.max_batch_tokens,
        )
        self._configs = RequestConfigs(model.resource_specs)
        self._stops = StopCheck(limits.vocab_size, model.eos_ids)
        self._table = RowTable(limits.max_running_requests)
        self._admission = Admission(limits, self.pools)
        self._queue = WaitQueue()
        self._outbox = Outbox()
        self._ids = itertools.count()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        return self._table.num_running

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        return self._queue.num_tokens

    def has_work(self) -> bool:
        """Whether :meth:`step` would do or report anything."""
        return bool(self._table.num_running or len(self._queue) or self._outbox)

    def drain(self) -> None:
        """Refuses new requests from now on; those accepted go on."""
        self._is_draining = True

    def submit(self, request: EngineRequest, client: int = 0, ticket: int = -1) -> int:
        """Accepts a request and returns its id.

        Args:
            client, ticket: what reports name it by; the ticket defaults to the id.

        Raises:
            InvalidArgument: it can never run: prompt empty, too long or outside the vocabulary, or larger than the
                whole KV cache.
            Unavailable: the queue is full, or the engine drains.
        """
        if self._is_draining:
            self.counters.refused["draining"] += 1
            raise Unavailable("the engine is draining")
        limit = self._admission.limit_of(request)
        request_id = next(self._ids)
        waiting = Waiting(request_id, client, request_id if ticket < 0 else ticket, request, limit)
        if limit == 0:
            self._end_unrun(waiting, FinishReason.LENGTH)
            return request_id
        self._queue.push(waiting)
        self._join()
        reason = self._queue.is_over(self.limits)
        if reason is not None and self._queue.remove(request_id) is not None:
            self.counters.refused["queue"] += 1
            raise Unavailable(reason)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Ends a request wherever it stands; reported with finish ``CANCELLED``.  No effect once it has ended."""
        waiting = self._queue.remove(request_id)
        if waiting is not None:
            self._end_unrun(waiting, FinishReason.CANCELLED)
            return
        row = self._table.row_of.get(request_id)
        if row is not None:
            self._end_row(row, FinishReason.CANCELLED)

    def finish(self, request_id: int, kept_tokens: int) -> None:
        """Ends a request whose text was found complete after ``kept_tokens``; it is reported no more."""
        waiting = self._queue.remove(request_id)
        row = self._table.row_of.get(request_id)
        if row is not None:
            self.counters.overshoot_tokens += max(int(self._table.generated[row]) - kept_tokens, 0)
            self._leave(row)
        if row is not None or waiting is not None:
            self.counters.finished[FinishReason.STOP] += 1

    def fail_all(self, error: MstarError) -> None:
        """Ends everything with one error."""
        while (waiting := self._queue.head()) is not None:
            self._queue.remove(waiting.request_id)
            self._report_failure(waiting.request_id, waiting.client, waiting.ticket, error.code, str(error))
        for row in list(self._table.row_of.values()):
            self._fail(row, error)

    def step(self) -> StepReport:
        """Lets waiting requests in, runs one step if any row can run, and reports all that happened since the last.

        An error inside the step ends the rows it belongs to; it never raises.
        """
        self._join()
        picked = self._batcher.next(self._table)
        if picked is not None:
            self._run(*picked)
        return self._outbox.take()

    # Arrival.

    def _join(self) -> None:
        """Moves requests from the queue's head into rows while rows and pages last."""
        while (waiting := self._queue.head()) is not None:
            if self._table.num_running >= self.limits.max_running_requests:
                return
            if not self.pools.fits_now(waiting.total_tokens):
                return
            info = self._configs.describe(waiting)
            try:
                self._engine.ingest(info)
            except Unavailable:
                return
            except Exception as error:  # a ValueError is a resource's word on the request's parameters
                self._queue.remove(waiting.request_id)
                code = ErrorCode.INVALID_ARG if isinstance(error, ValueError) else ErrorCode.INTERNAL
                self._report_failure(waiting.request_id, waiting.client, waiting.ticket, code, str(error))
                continue
            self._queue.remove(waiting.request_id)
            self._table.join(waiting, info, self._transitions.entry_state)
            self.counters.prompt_tokens += waiting.request.num_prompt_tokens

    # A step.

    def _run(self, rows: np.ndarray, batch: Batch) -> None:
        try:
            result = self._engine.exec(batch)
        except Exception as error:
            log.exception("%s/%s: a step of %d rows failed", batch.node, batch.graph_walk, rows.size)
            for row in rows.tolist():
                self._fail(row, error)
            return
        for request_id, row_error in result.errors.items():
            self._fail(self._table.row_of[request_id], row_error)
        if result.refused is not None:
            self._hold_back(rows, result.refused)
        elif result.request_ids:
            if len(result.request_ids) != rows.size:  # some rows failed or were skipped
                rows = np.array([self._table.row_of[request_id] for request_id in result.request_ids], np.int64)
            self._advance(rows, result.host["new_token"], result.host.get("fault"))

    def _advance(self, rows: np.ndarray, tokens: np.ndarray, fault: np.ndarray | None) -> None:
        """Counts, checks and moves every row that ran; ``tokens`` int64 [n], ``fault`` bool [n]."""
        if fault is not None and fault.any():
            self.counters.row_faults += int(fault.sum())
            for row in rows[fault].tolist():
                self._fail(row, EngineFault("the model's logits are not finite"))
            rows, tokens = rows[~fault], tokens[~fault]
        table = self._table
        table.generated[rows] += 1
        finish = self._stops.check(table, rows, tokens)
        table.state[rows], table.iteration[rows] = self._transitions.advance(table.state[rows], table.iteration[rows])
        finish[(finish == FinishReason.RUNNING) & (table.state[rows] == DONE)] = FinishReason.LENGTH
        is_output = finish != FinishReason.STOP
        self.counters.generated_tokens += int(is_output.sum())
        self._outbox.add_step(
            table.request_id[rows],
            table.client[rows],
            table.ticket[rows],
            np.where(is_output, tokens, NO_TOKEN),
            finish,
        )
        ended = finish != FinishReason.RUNNING
        if ended.any():
            for row, reason in zip(rows[ended].tolist(), finish[ended].tolist(), strict=True):
                self.counters.finished[FinishReason(reason)] += 1
                self._leave(row)

    def _hold_back(self, rows: np.ndarray, outcome: AdmitOutcome) -> None:
        """After a refused admission: the newest rows sit out until somebody leaves; the oldest goes on.

        Reservations make this rare.  Half of the rows are held at a time, so a step is tried again soon; when not
        even one row fits and nobody else can run, one request ends, which frees what it held.
        """
        self.counters.refused_admissions += 1
        table, reason = self._table, outcome.reason
        rows = rows[table.state[rows] >= 0]  # without those that just failed
        if rows.size == 0 or outcome.ok:
            return
        if isinstance(reason, AdmitRuntimeError):
            named = table.row_of.get(reason.request_id)
            for row in rows.tolist() if named is None else [named]:
                self._fail(row, EngineFault(reason.message))
            return
        newest_last = rows[np.argsort(table.request_id[rows])]
        table.is_held[newest_last[rows.size // 2 :]] = True
        running = np.flatnonzero(table.state >= 0)
        if not table.is_held[running].all():
            return
        if running.size == 1:
            self._end_row(int(running[0]), FinishReason.LENGTH)
            return
        newest = int(running[np.argmax(table.request_id[running])])
        self._fail(newest, Unavailable("the KV cache is exhausted"))

    # Departure.

    def _leave(self, row: int) -> None:
        self._engine.remove(int(self._table.request_id[row]))
        self._table.leave(row)

    def _end_row(self, row: int, reason: FinishReason) -> None:
        table = self._table
        self.counters.finished[reason] += 1
        self._outbox.add_end(int(table.request_id[row]), int(table.client[row]), int(table.ticket[row]), reason)
        self._leave(row)

    def _end_unrun(self, waiting: Waiting, reason: FinishReason) -> None:
        self.counters.finished[reason] += 1
        self._outbox.add_end(waiting.request_id, waiting.client, waiting.ticket, reason)

    def _fail(self, row: int, error: Exception) -> None:
        table = self._table
        code, message = ErrorCode.INTERNAL, f"the engine failed: {type(error).__name__}: {error}"
        if isinstance(error, MstarError):
            code, message = error.code, str(error)
        self._report_failure(int(table.request_id[row]), int(table.client[row]), int(table.ticket[row]), code, message)
        self._leave(row)

    def _report_failure(self, request_id: int, client: int, ticket: int, code: ErrorCode, message: str) -> None:
        self.counters.failed += 1
        self._outbox.add_failure(Failure(request_id, client, ticket, code, message))
