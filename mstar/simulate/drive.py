"""The loop around a conductor, in virtual time."""

from __future__ import annotations

from mstar.conductor.report import StepReport
from mstar.conductor.request import EngineRequest
from mstar.runtime.core import MESSAGES_PER_STEP
from mstar.simulate.arrivals import Arrivals
from mstar.simulate.measures import Measures
from mstar.simulate.rig import Rig
from mstar.utils.errors import EngineFault, ErrorCode, MstarError

MOST_IDLE_CALLS = 8  # in a row that neither do nor tell anything, while time stands still


def simulate(rig: Rig, measures: Measures) -> None:
    """Plays the rig's trace to its end, as an engine's own loop would.

    Raises:
        EngineFault: a step failed, or requests are left and nothing will ever happen to them.
    """
    conductor, clock, arrivals = rig.conductor, rig.clock, Arrivals(rig.trace)
    rig.engine.on_step = measures.on_step
    idle_calls = 0
    while True:
        if not conductor.has_work():
            due = arrivals.next_ns()
            if due is None:
                return
            clock.wait_until(due)
        for arrived_ns, ticket in arrivals.take(clock.now_ns, MESSAGES_PER_STEP):
            _submit(rig, measures, arrivals, ticket, arrived_ns)
        if not conductor.has_work():
            continue
        before = clock.now_ns
        report = conductor.step()
        check(report)
        measures.on_report(report, clock.now_ns, conductor.num_queued, conductor.num_running)
        for ticket in measures.ends_of(report):
            arrivals.ended(ticket, clock.now_ns)
        idle_calls = idle_calls + 1 if report.is_empty and not report.num_stepped and clock.now_ns == before else 0
        if idle_calls > MOST_IDLE_CALLS:
            due = arrivals.next_ns()
            if due is None:
                waiting = f"{conductor.num_queued} requests wait and {conductor.num_running} run"
                raise EngineFault(f"{waiting}, but no step is launched and nobody comes or goes")
            clock.wait_until(due)


def check(report: StepReport) -> None:
    """Raises what the conductor takes for the engine's failure: no trace can cause it."""
    for failure in report.failures:
        if failure.code is ErrorCode.INTERNAL:
            raise EngineFault(failure.message)


def _submit(rig: Rig, measures: Measures, arrivals: Arrivals, ticket: int, arrived_ns: int) -> None:
    rig.clock.spend(rig.request_ns)
    measures.on_arrival(ticket, arrived_ns)
    try:
        request_id = rig.conductor.submit(request_of(rig, ticket), ticket=ticket)
    except MstarError as error:
        measures.on_refusal(ticket, error, rig.clock.now_ns)
        arrivals.ended(ticket, rig.clock.now_ns)
        return
    rig.engine.ticket_of[request_id] = ticket


def request_of(rig: Rig, ticket: int) -> EngineRequest:
    """What a client of the trace asks."""
    trace = rig.trace
    return EngineRequest(
        prompt_ids=trace.prompt(ticket),
        max_tokens=int(trace.max_tokens[ticket]),
        temperature=0.0,
        request_priority=int(trace.priorities[ticket]),
        tenant=trace.tenant_names[trace.tenants[ticket]],
    )
