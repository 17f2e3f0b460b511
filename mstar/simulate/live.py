"""Plays a trace on a real engine in real time, around the loop that an engine process runs."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from copy import deepcopy
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch

from mstar.conductor.conductor import Conductor
from mstar.conductor.counters import Counters
from mstar.conductor.protocols import StepEngine
from mstar.conductor.report import StepReport
from mstar.runtime.core import MESSAGES_PER_STEP, EngineCore, limits_of
from mstar.runtime.messages import encode
from mstar.runtime.options import EngineOptions
from mstar.runtime.outgoing import by_client
from mstar.simulate.arrivals import Arrivals
from mstar.simulate.clients import Clients
from mstar.simulate.drive import check
from mstar.simulate.measures import Measures
from mstar.simulate.real_time import RealClock
from mstar.simulate.summary import Played
from mstar.simulate.timed_engine import TimedEngine
from mstar.simulate.trace import Trace, make_trace
from mstar.utils.errors import MstarError

NOTHING_RAN_NS = 1_000_000  # that an engine process waits when no row can run
WARM_UP_ROWS, WARM_UP_TOKENS = 8, 8  # and what each of them generates
_DEFAULTS = EngineOptions(model="any")

# Options that concern the conductor alone: runs that differ in these can share a loaded engine.
SHARED_WITH = frozenset(
    {
        "max_queued_requests", "max_queued_requests_per_tenant", "max_queued_tokens", "chunked_prefill",
        "target_inter_token_ms", "mixed_steps", "run_ahead", "max_steps_ahead", "priority_ageing_s",
        "output_token_weight", "prefix_passes",
    }
)  # fmt: skip


def load_engines(runs: Mapping[str, EngineOptions], clock: RealClock) -> dict[str, Live]:
    """What plays traces with each of these options, by the same names; as few models are loaded as they allow.

    Raises:
        LoadError: the model cannot be loaded.
    """
    cores: dict[EngineOptions, EngineCore] = {}
    engines = {}
    for name, options in runs.items():
        alike = msgspec.structs.replace(options, **{each: getattr(_DEFAULTS, each) for each in SHARED_WITH})
        if alike not in cores:
            cores[alike] = EngineCore(options)
        engines[name] = Live(name, cores[alike], options, clock)
    gc.collect()
    gc.freeze()  # as an engine process: a collection over the models' objects would show as a late step
    return engines


class Live:
    """A loaded engine and a conductor of its own, for one trace after another.  For one thread."""

    def __init__(self, name: str, core: EngineCore, options: EngineOptions, clock: RealClock) -> None:
        """``name`` is no other's of the same engine.  ``options``: the engine's own, but for :data:`SHARED_WITH`."""
        self.info = core.info
        self._name = name
        self._clock = clock
        self._engine = TimedEngine(core.engine, clock)
        limits = limits_of(options, core.model.max_seq_len, core.model.vocab_size, core.engine.device)
        self.conductor = Conductor(cast(StepEngine, self._engine), core.model, limits, clock=clock)
        self._num_played = 0

    def warm_up(self, trace: Trace) -> None:
        """Runs its first prompts with short answers, all at once, for what is made at its first use."""
        prompts = trace.prompt_tokens[:WARM_UP_ROWS]
        answers = np.minimum(trace.output_tokens[:WARM_UP_ROWS], WARM_UP_TOKENS)
        self.play(make_trace(np.zeros(prompts.size), prompts, answers), 1)

    def play(self, trace: Trace, itl_bound_ns: int) -> tuple[Measures, Played]:
        """A trace from its first arrival until all have ended; what is noted is sorted out after that.

        Raises:
            EngineFault: a step failed.
        """
        self._num_played += 1
        before = deepcopy(self.conductor.counters)
        self._engine.steps.clear()
        clients = Clients(trace, self.info.vocab_size, f"{self._name}, run {self._num_played}")
        run = _Run(self.conductor, trace, clients, self._clock)
        run.play()
        measures = Measures(trace, itl_bound_ns)
        for step in self._engine.steps:
            measures.on_step(*step)
        run.tell(measures)
        counters = _counted(before, self.conductor.counters)
        busy_ns = sum(nanoseconds for _, nanoseconds in self._engine.steps)
        return measures, Played(trace, counters, self.conductor.max_running_requests, busy_ns)


def _counted(before: Counters, now: Counters) -> Counters:
    """What was counted in between."""
    return Counters(**{name: value - getattr(before, name) for name, value in vars(now).items()})


class _Told(NamedTuple):
    """What a call of the conductor told, when, and the tickets that their clients ended then."""

    report: StepReport
    now_ns: int
    num_queued: int
    num_running: int
    stopped: list[int]


class _Run:
    """One trace on its way; times are nanoseconds since its start."""

    def __init__(self, conductor: Conductor, trace: Trace, clients: Clients, clock: RealClock) -> None:
        self._conductor = conductor
        self._clients = clients
        self._clock = clock
        self._arrivals = Arrivals(trace)
        self._request_ids = [-1] * len(trace)
        self._arrived: list[tuple[int, int]] = []  # ticket, time
        self._refused: list[tuple[int, MstarError, int]] = []
        self._told: list[_Told] = []
        self._start_ns = clock()

    @torch.inference_mode()  # as the engine's own loop runs
    def play(self) -> None:
        conductor, arrivals = self._conductor, self._arrivals
        while True:
            if not conductor.has_work():
                due_ns = arrivals.next_ns()
                if due_ns is None:
                    return
                self._clock.sleep(due_ns - self._now_ns())
            self._let_in()
            if conductor.has_work():
                self._step()

    def tell(self, measures: Measures) -> None:
        """All that was noted."""
        for ticket, arrived_ns in self._arrived:
            measures.on_arrival(ticket, arrived_ns)
        for refused in self._refused:
            measures.on_refusal(*refused)
        for report, now_ns, num_queued, num_running, stopped in self._told:
            measures.on_report(report, now_ns, num_queued, num_running)
            if stopped:
                measures.on_stop(np.array(stopped), now_ns)

    def _now_ns(self) -> int:
        return self._clock() - self._start_ns

    def _let_in(self) -> None:
        """Submits those that have come until as many were accepted as an engine process takes between two steps."""
        most = MESSAGES_PER_STEP
        while most and (came := self._arrivals.take(self._now_ns(), most)):
            most -= sum(self._submit(ticket, arrived_ns) for arrived_ns, ticket in came)

    def _submit(self, ticket: int, arrived_ns: int) -> bool:
        """Whether it was accepted."""
        self._arrived.append((ticket, arrived_ns))
        try:
            self._request_ids[ticket] = self._conductor.submit(self._clients.request(ticket), ticket=ticket)
        except MstarError as error:
            now_ns = self._now_ns()
            self._refused.append((ticket, error, now_ns))
            self._arrivals.ended(ticket, now_ns)
            return False
        return True

    def _step(self) -> None:
        """One turn of the loop; each report becomes the messages that front ends would get."""
        conductor = self._conductor
        report = conductor.step()
        ended = [failure.ticket for failure in report.failures]
        for _, tickets, message in by_client(report):
            encode(message)
            ended += tickets
        now_ns = self._now_ns()
        check(report)
        stopped = self._clients.hear(report)
        for ticket in stopped:
            conductor.finish(self._request_ids[ticket], self._clients.heard(ticket))
        for ticket in (*ended, *stopped):
            self._arrivals.ended(ticket, now_ns)
        self._told.append(_Told(report, now_ns, conductor.num_queued, conductor.num_running, stopped))
        if report.is_empty and not report.num_stepped:
            self._clock.sleep(NOTHING_RAN_NS)
