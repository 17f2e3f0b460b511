"""Requests in, steps out: admission, queue, batching, stop rules, and what each step brought."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from mstar.conductor.admission import Admission
from mstar.conductor.batching import Batcher
from mstar.conductor.configs import RequestConfigs
from mstar.conductor.counters import Counters
from mstar.conductor.deadlines import Deadlines
from mstar.conductor.departures import Departures
from mstar.conductor.entrance import Entrance
from mstar.conductor.followers import Followers
from mstar.conductor.landing import Landing
from mstar.conductor.lanes import combined_lanes, plain_lanes
from mstar.conductor.lobby import Lobby
from mstar.conductor.pace import Pace
from mstar.conductor.parameters import RefusedParameter
from mstar.conductor.pools import Pools
from mstar.conductor.pressure import Pressure
from mstar.conductor.progress import Progress
from mstar.conductor.protocols import ServedModel, StepEngine
from mstar.conductor.queue import Limits, Waiting
from mstar.conductor.report import Outbox, StepReport
from mstar.conductor.request import EngineRequest, FinishReason
from mstar.conductor.rows import RowTable
from mstar.conductor.step_times import StepTimes
from mstar.conductor.steps import Flight, Steps
from mstar.conductor.stops import StopCheck
from mstar.conductor.transitions import Transitions
from mstar.conductor.wait_queue import WaitQueue
from mstar.conductor.way_back import WayBack
from mstar.graph import compile_walks
from mstar.utils import knobs
from mstar.utils.errors import MstarError, Unavailable


class Conductor:
    """Decides which requests run and which rows each step has.  One thread calls it.

    A request joins when a row and its pages are free, in the order of :class:`~mstar.conductor.wait_queue.WaitQueue`;
    it leaves at a step's end.  Every accepted request ends exactly once: in a report's rows, in its failures, or by
    :meth:`finish`.

    With ``limits.run_ahead`` a step is launched before the tokens of the one before have come, so two are in the
    device's queue; and up to ``limits.max_steps_ahead`` before that while nobody waits and the engine needs nothing of
    the host for them.  A request that turns out to have ended runs along in the steps that were launched; those tokens
    are dropped.  A request under a grammar needs its token on the host before its next step, so beside others it runs
    every second one.
    """

    def __init__(
        self,
        engine: StepEngine,
        model: ServedModel,
        limits: Limits,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``clock`` tells the nanoseconds that requests' deadlines are on."""
        self.limits = limits
        self.max_running_requests = min(limits.max_running_requests, engine.capacity)
        self.counters = Counters()
        self.pools = Pools(engine.resources)
        self._engine = engine
        self._transitions = transitions = Transitions(compile_walks(model.walks), model.next_walk)
        self._times = times = StepTimes()
        self._pace = Pace(limits.target_inter_token_ns, times) if limits.target_inter_token_ns else None
        self._batcher = Batcher(
            plain_lanes(transitions, engine, limits.chunked_prefill),
            combined_lanes(transitions, engine, limits.chunked_prefill) if limits.mixed_steps else [],
            transitions.entry_state,
            limits.max_batch_tokens,
            self._pace,
        )
        self._table = RowTable(self.max_running_requests)
        self._admission = Admission(limits, self.pools)
        self._deadlines = Deadlines(clock)
        self._configs = RequestConfigs(
            model.resource_specs, limits.vocab_size, [each for each in model.eos_ids if 0 <= each < limits.vocab_size]
        )
        self._outbox = Outbox()
        self._departures = Departures(engine, self._table, self.counters, self._outbox)
        queue = WaitQueue(limits, self._table, clock, self.pools)
        self._lobby = Lobby(queue, engine.prepare_request, limits, self._departures)
        self._followers = Followers(engine, self._table, self.pools, self._departures, self.counters, self._outbox)
        stops = StopCheck(limits.vocab_size, model.eos_ids, engine.accept_tokens, self._deadlines)
        self._landing = Landing(engine, self._table, stops, self._departures, self.counters, self._outbox)
        if self.pools.may_run_out:
            self._table.keep_history(limits.max_seq_len)
        self._pressure = Pressure(
            engine,
            self._table,
            self.pools,
            self._departures,
            self.counters,
            transitions.entry_state,
            WayBack(limits.preemption, times),
            clock,
        )
        self._entrance = Entrance(
            engine,
            self._table,
            self._lobby,
            self.pools,
            self._followers,
            self._pressure,
            self._departures,
            self.counters,
            self._outbox,
            limits,
            self._pace,
            transitions.entry_state,
        )
        self._steps = Steps(
            engine, self._table, transitions, self._departures, self._pressure, self.counters, self._outbox
        )
        self._progress = Progress(self._table, self._lobby, self.pools, self._departures)
        self._flights: deque[Flight] = deque()  # launched and not landed, oldest first
        self._plans_ahead = knobs.pre_plan_spec()
        self._ids = itertools.count()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        return self._table.num_running

    @property
    def num_queued(self) -> int:
        """Requests without a row, those included that are being prepared for one."""
        return len(self._lobby)

    @property
    def num_queued_tokens(self) -> int:
        return self._lobby.num_tokens

    def has_work(self) -> bool:
        """Whether :meth:`step` would do or report anything; true while a step is in flight, or a request prepared."""
        return bool(self._table.num_running or len(self._lobby) or self._outbox or self._flights)

    def drain(self) -> None:
        """Refuses new requests from now on; those accepted go on."""
        self._is_draining = True

    def submit(self, request: EngineRequest, client: int = 0, ticket: int = -1) -> int:
        """Accepts a request and returns its id.

        Args:
            client, ticket: what reports name it by; the ticket defaults to the id.

        Raises:
            InvalidArgument: it can never run: prompt empty, too long or outside the vocabulary, or larger than the
                whole KV cache; or a parameter is outside its contract, or asks for what the model does not have.
            Unavailable: as many wait as may, the engine drains, or the request's time is over or shorter than a step.
        """
        if self._is_draining:
            self.counters.refused["draining"] += 1
            raise Unavailable("the engine is draining")
        limit = self._admission.limit_of(request)
        request_id = next(self._ids)
        info = self._configs.describe(request_id, request, limit)
        waiting = Waiting(request_id, client, request_id if ticket < 0 else ticket, request, limit, info)
        if limit == 0:
            self._departures.end_unrun(waiting, FinishReason.LENGTH)
            return request_id
        if request.deadline_ns:
            shortfall = self._deadlines.shortfall(request.deadline_ns)
            if shortfall is not None:
                self.counters.refused["deadline"] += 1
                raise Unavailable(shortfall)
            self._deadlines.add(request.deadline_ns)
        self._engine.clock.mark("arrivals")
        if not self._entrance.admits_at_once(waiting):
            self._wait(waiting)
        return request_id

    def _wait(self, waiting: Waiting) -> None:
        """Has a request wait; Unavailable where it may not."""
        self._lobby.add(waiting)
        self._entrance.let_in()
        num_free_rows = self.max_running_requests - self._table.num_running
        reason = self._lobby.refusal(waiting.request.tenant, num_free_rows, self._entrance.has_prompt_room)
        if reason is not None and self._lobby.remove(waiting.request_id) is not None:
            self.counters.refused["queue"] += 1
            raise Unavailable(reason)

    def check(self, request: EngineRequest) -> None:
        """Does what can be done of a request without running it: all checks, and the slow work on a grammar.

        Raises:
            InvalidArgument: as :meth:`submit`, or the request could not be prepared.
        """
        limit = self._admission.limit_of(request)
        info = self._configs.describe(-1, request, limit)
        if limit:
            try:
                self._engine.prepare_request(info.resource_configs)
            except ValueError as error:  # a resource's word on the request's parameters
                raise RefusedParameter(error) from None

    def cancel(self, request_id: int) -> None:
        """Ends a request wherever it stands; reported with finish ``CANCELLED``.  No effect once it has ended."""
        waiting = self._lobby.remove(request_id)
        if waiting is not None:
            self._departures.end_unrun(waiting, FinishReason.CANCELLED)
            return
        row = self._table.row_of.get(request_id)
        if row is not None:
            self._departures.end(row, FinishReason.CANCELLED)

    def finish(self, request_id: int, kept_tokens: int) -> None:
        """Ends a request whose text was found complete after ``kept_tokens``; it is reported no more."""
        row = self._table.row_of.get(request_id)
        if row is not None:
            self.counters.overshoot_tokens += max(int(self._table.generated.values[row]) - kept_tokens, 0)
            self._departures.leave(row, FinishReason.STOP)
        elif self._lobby.remove(request_id) is not None:
            self.counters.finished[FinishReason.STOP] += 1

    def fail_all(self, error: MstarError) -> None:
        """Ends everything with one error."""
        for waiting in self._lobby:
            self._lobby.remove(waiting.request_id)
            self._departures.fail_unrun(waiting, error.code, str(error))
        self._departures.fail_all(dict.fromkeys(list(self._table.row_of), error))

    def step(self) -> StepReport:
        """Lets waiting requests in, launches a step if any row can run, and reports all that happened since the last.

        Running ahead, that is what the step launched by the last call brought, else what this call's did.  An error
        inside a step ends the rows it belongs to; it never raises.
        """
        if self._deadlines.are_due():
            self._expire()
        self._lobby.take_prepared()
        if len(self._followers):
            self._followers.go_on()
        if len(self._pressure):
            self._pressure.come_back(bool(self._flights))
        self._entrance.let_in()
        flights, ahead = self._flights, self._steps_ahead()
        num_before = len(flights)
        goes_on = num_before <= ahead and self._launch()
        while goes_on and 1 < ahead >= len(flights):
            goes_on = self._launch()
        self._settle()
        is_idle = len(flights) <= num_before
        if flights and (is_idle or len(flights) > ahead):
            self._land(flights.popleft())
            if is_idle and self._table.waits_for_host.count:
                self._launch()  # of rows that waited for what has landed
            self._settle()
        if self._plans_ahead:
            self._plan_ahead()
        report = self._outbox.take()
        if report.num_stepped or num_before or not report.is_empty:
            self._progress.was_made()
        elif self._progress.was_none():
            report = self._outbox.take()
        return report

    def _steps_ahead(self) -> int:
        """How many steps may be in flight when a call returns."""
        if not self.limits.run_ahead:
            return 0
        most = self.limits.max_steps_ahead
        if most > 1 and not (len(self._lobby) or self._table.waits_for_host.count):
            pick = self._batcher.steady(self._table)
            if pick is not None and self._engine.can_queue(pick.batch):
                return most
        return 1

    def _settle(self) -> None:
        """Deals with what the oldest step could not run, once all before it have landed: a row it failed for may have
        ended well in one of them."""
        while self._flights and not self._flights[0].is_settled:
            self._steps.settle(self._flights[0])
            if self._flights[0].handle is not None:
                return
            self._flights.popleft()

    def _launch(self) -> bool:
        """Whether a whole step was launched; nothing is behind one that is yet to be settled."""
        if self._flights and not self._flights[-1].is_settled:
            return False
        pick = self._batcher.pick(self._table)
        self._engine.clock.mark("schedule")
        if pick is None:
            return False
        self._batcher.ran(self._table, pick)
        launched_ns = self._deadlines.now_ns()
        flight = self._steps.launch(pick)
        flight.launched_ns = launched_ns
        self._flights.append(flight)
        return flight.is_settled

    def _land(self, flight: Flight) -> None:
        self._landing.land(flight)
        took_ns = self._deadlines.landed(flight.launched_ns)
        (self._pace or self._times).landed(took_ns, flight.prompt_tokens)

    def _plan_ahead(self) -> None:
        """Has the engine plan what the next call launches, should nothing change until then."""
        pick = self._batcher.pick(self._table)
        if pick is not None:
            self._engine.pre_plan(pick.batch)

    def _expire(self) -> None:
        """Ends requests whose time is over, but for rows with a token in flight, which end as it lands."""
        now, table = self._deadlines.now_ns(), self._table
        queued = self._lobby.expire(now)
        late = (table.deadline_ns <= now).nonzero()[0]
        for flight in self._flights:
            late = np.setdiff1d(late, flight.drawing_rows)
        for row in late.tolist():
            if table.last_step.values[row] < 0:
                self._departures.expire_row(row)
            else:
                self._departures.end(row, FinishReason.TIMEOUT)
        self._deadlines.reset(queued, int(table.deadline_ns.min()))
