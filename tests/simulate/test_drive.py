"""A simulation as a whole: every request ends once, time goes forward, and the same seed gives the same run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar.conductor.request import FinishReason
from mstar.simulate.composition import Composition
from mstar.simulate.measures import FAILED, REFUSED, RUNNING, UNSEEN
from mstar.simulate.summary import Slo, summarise
from mstar.simulate.synthetic import SYNTHETIC, Ask, with_tenants
from mstar.simulate.trace import Trace, TraceLine, make_trace, trace_of
from mstar.utils.errors import EngineFault
from tests.simulate.rigs import CONTEXT, play

SLO = Slo(100.0, 10.0)

requests = st.tuples(
    st.floats(0, 0.2),  # arrival, s
    st.integers(1, 300),  # some prompts are too long
    st.integers(1, 60),
    st.integers(0, 40),  # asked for and not used
    st.integers(0, 3),  # session
)


def trace_from(rows: list[tuple[float, int, int, int, int]]) -> Trace:
    lines = []
    seen: set[int] = set()
    for arrival, prompt, output, unused, session in rows:
        follows = session > 0 and session in seen
        seen.add(session)
        lines.append(
            TraceLine(
                prompt_tokens=prompt,
                output_tokens=output,
                arrival=None if follows else arrival,
                think=arrival if follows else None,
                max_tokens=output + unused,
                session=str(session) if session else None,
            )
        )
    return trace_of(lines)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(requests, min_size=1, max_size=30),
    st.sampled_from(["cpu", "cuda"]),
    st.booleans(),
    st.sampled_from(["sum", "peak", "none"]),
    st.sampled_from([12, 40, 100]),
    st.integers(0, 20),
)
def test_every_request_ends_once_and_pages_return(rows, device, mixed, fit, pages, queued):
    trace = trace_from(rows)
    rig, measures = play(
        trace,
        device,
        mixed_steps=mixed,
        resources=f'{{"kv_cache": {{"admission_fit": "{fit}"}}}}',
        kv_memory_bytes=(pages + 1) * 8 * 4,
        max_queued_requests=queued,
    )
    # Ending twice is an assertion of Measures.
    assert set(measures.end.tolist()) <= {FinishReason.STOP, FinishReason.LENGTH, FAILED, REFUSED}
    assert (measures.arrival_ns != UNSEEN).all()
    finished = np.isin(measures.end, (FinishReason.STOP, FinishReason.LENGTH))
    whole = trace.prompt_tokens + trace.output_tokens < min(pages * 8, CONTEXT)
    fits = finished & whole
    assert (measures.generated[fits] <= trace.output_tokens[fits]).all()
    if fit != "none":  # nobody's answer is cut for want of pages
        assert (measures.generated[fits] == trace.output_tokens[fits]).all()
        assert (measures.end != FAILED).all()
    told = measures.first_ns != UNSEEN
    assert (measures.first_ns[told] >= measures.arrival_ns[told]).all()
    assert (measures.end_ns >= np.where(told, measures.first_ns, measures.arrival_ns)).all()
    kv = rig.engine.resources["kv_cache"]
    kv.check_pages()
    assert kv.free_pages == kv.num_usable_pages
    assert kv.promised_pages == 0
    assert not rig.engine.ticket_of


@settings(max_examples=25, deadline=None)
@given(st.lists(requests, min_size=1, max_size=20), st.sampled_from(["cpu", "cuda"]))
def test_a_turn_comes_after_the_one_before_has_ended(rows, device):
    trace = trace_from(rows)
    _, measures = play(trace, device)
    for ticket in np.flatnonzero(trace.follows >= 0).tolist():
        before = trace.follows[ticket]
        assert measures.arrival_ns[ticket] == measures.end_ns[before] + trace.due_ns[ticket]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_same_seed_gives_the_same_run(name):
    ask = Ask(requests=60, rate=200.0, prompt_tokens=40, output_tokens=20, context=CONTEXT, seed=3)
    summaries = []
    for _ in range(2):
        rig, measures = play(with_tenants(SYNTHETIC[name](ask), 3, seed=3))
        summaries.append(summarise(rig.played(), measures, SLO))
        assert (measures.end != RUNNING).all()
    assert summaries[0] == summaries[1]
    rig, measures = play(SYNTHETIC[name](replace(ask, seed=4)))
    assert summarise(rig.played(), measures, SLO).seconds != summaries[0].seconds


def test_a_chat_finds_what_was_said_before():
    ask = Ask(requests=16, rate=10.0, prompt_tokens=16, output_tokens=8, context=CONTEXT)
    rig, measures = play(SYNTHETIC["chats"](ask))
    assert summarise(rig.played(), measures, SLO).cached_share > 0.4
    rig, measures = play(SYNTHETIC["chats"](ask), prefix_cache=False)
    assert summarise(rig.played(), measures, SLO).cached_share == 0


@pytest.mark.parametrize("pages", [60, 400])
def test_a_prefix_index_in_which_nobody_finds_anything_changes_nothing(monkeypatch, pages):
    ask = Ask(requests=80, rate=400.0, prompt_tokens=40, output_tokens=20, context=CONTEXT)
    summaries = []
    for shares in (False, True):
        monkeypatch.setattr(Trace, "shares_streams", shares)
        rig, measures = play(SYNTHETIC["poisson"](ask), kv_memory_bytes=pages * 8 * 4)
        kept = rig.engine.resources["kv_cache"].counters["prefix_insertions"]
        assert bool(kept) is shares
        summaries.append(summarise(rig.played(), measures, SLO))
    assert summaries[0] == summaries[1]


def test_running_ahead_hides_the_hosts_time():
    trace = make_trace(np.zeros(8), np.full(8, 16), np.full(8, 64))
    seconds = {}
    for mode in ("off", "on"):
        rig, measures = play(trace, run_ahead=mode, max_steps_ahead=1)
        seconds[mode] = summarise(rig.played(), measures, SLO).seconds
    # A step takes 1.8 ms and more on the device, 0.1 ms on the host.
    assert 0.9 < seconds["on"] / seconds["off"] < 0.97


def test_time_of_a_lone_request_is_its_steps_times():
    trace = make_trace(np.array([0.5]), np.array([20]), np.array([4]))
    rig, measures = play(trace, "cpu")
    costs, host_ns = rig.engine._costs, 50_000
    first, *rest = [(0, 0, 1, 20, 210), (1, 21, 0, 0, 0), (1, 22, 0, 0, 0), (1, 23, 0, 0, 0)]
    from_steps = [int(1e6 * costs.step_ms(Composition(*step))) for step in (first, *rest)]
    assert measures.arrival_ns[0] == 500_000_000
    assert measures.first_ns[0] - measures.arrival_ns[0] == host_ns + 101_000 + from_steps[0]
    assert measures.end_ns[0] - measures.first_ns[0] == 3 * 101_000 + sum(from_steps[1:])


def test_requests_that_nothing_will_happen_to_are_told_of(monkeypatch):
    trace = make_trace(np.zeros(3), np.full(3, 16), np.full(3, 4))
    monkeypatch.setattr("mstar.conductor.batching.Batcher.pick", lambda self, table: None)
    with pytest.raises(EngineFault, match="3 run, but no step is launched"):
        play(trace)


def test_a_failing_step_is_no_result(monkeypatch):
    trace = make_trace(np.zeros(3), np.full(3, 16), np.full(3, 4))
    monkeypatch.setattr("mstar.simulate.engine.VirtualEngine._look_up", lambda self, batch: 1 / 0)
    with pytest.raises(EngineFault, match="division"):
        play(trace)
