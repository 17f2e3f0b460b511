"""Traces on a real engine: who asks for what, how answers end, and that all that ran is counted."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mstar.conductor.report import StepReport
from mstar.conductor.request import FinishReason
from mstar.runtime.core import EngineCore, load_options
from mstar.runtime.options import EngineOptions
from mstar.simulate import live
from mstar.simulate.clients import Clients
from mstar.simulate.live import SHARED_WITH, Live, load_engines
from mstar.simulate.measures import REFUSED
from mstar.simulate.real_time import CpuClock, RealClock, WallClock
from mstar.simulate.summary import Slo, summarise
from mstar.simulate.trace import NOBODY, Trace, make_trace
from tests.runtime.tiny import VOCAB, write_checkpoint
from tests.simulate.rigs import CONTEXT
from tests.simulate.rigs import play as play_simulated

COMMON = {"max_running_requests": 4, "max_batch_tokens": 24, "page_size": 8}
MODES = {"mixed": {}, "apart": {"mixed_steps": False}, "ahead": {"run_ahead": "on"}}


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> EngineOptions:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    return EngineOptions(model=str(folder), device="cpu", num_threads=1, max_seq_len=CONTEXT, **COMMON)


@pytest.fixture(scope="module")
def core(options) -> EngineCore:
    return EngineCore(options)


def engine(core: EngineCore, options: EngineOptions, clock: RealClock | None = None, **given: object) -> Live:
    base = {name: getattr(options, name) for name in options.__struct_fields__}
    return Live(str(given), core, EngineOptions(**base | given), clock or WallClock())


def sessions(number: int, turns: int) -> Trace:
    """Chats whose turns come a millisecond after the answer before."""
    tickets = np.arange(number * turns).reshape(number, turns)
    follows = np.concatenate([np.full((number, 1), NOBODY), tickets[:, :-1]], axis=1).ravel()
    before = np.tile(np.arange(turns) * (11 + 6), number)
    streams = np.repeat(np.arange(number), turns)
    return make_trace(
        np.full(tickets.size, 1e-3), before + 11, np.full(tickets.size, 6), follows=follows, streams=streams
    )


def told(tickets: list[int], tokens: list[int]) -> StepReport:
    columns = np.array(tickets), np.zeros(len(tickets), np.int64), np.array(tickets)
    return StepReport(*columns, np.array(tokens, np.int32), np.zeros(len(tickets), np.uint8))


@pytest.mark.parametrize("mode", MODES)
def test_every_request_ends_once_and_every_token_is_in_a_step(core, options, mode):
    rng = np.random.default_rng(1)
    trace = make_trace(np.sort(rng.uniform(0, 0.02, 20)), rng.integers(1, 60, 20), rng.integers(1, 12, 20))
    player = engine(core, options, **MODES[mode])
    for _ in range(2):  # a run finds nothing of the one before
        measures, played = player.play(trace, 10**15)
        assert (measures.end == FinishReason.LENGTH).all()
        assert (measures.generated == trace.output_tokens).all()
        assert (measures.arrival_ns == trace.due_ns).all()
        assert (measures.first_ns > trace.due_ns).all()
        drawn = int((trace.output_tokens - 1).sum())
        assert sum(measures.step_tokens.values()) == int(trace.prompt_tokens.sum()) + drawn
        assert played.counters.prompt_tokens == int(trace.prompt_tokens.sum())
        assert played.counters.finished == Counter({FinishReason.LENGTH: 20})
        assert played.busy_ns == sum(measures.step_ns.values()) <= int(measures.end_ns.max())
        assert summarise(played, measures, Slo(1e9, 1e9)).in_time == 1
    assert ("mixed" in measures.steps) is (mode != "apart")


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_an_answer_ends_where_the_trace_says_though_more_was_asked_for(core, options, run_ahead):
    trace = make_trace(np.zeros(8), np.full(8, 12), np.arange(1, 9))
    trace = replace(trace, max_tokens=trace.output_tokens + np.array([0, 30] * 4))
    measures, played = engine(core, options, run_ahead=run_ahead).play(trace, 1)
    assert (measures.generated == trace.output_tokens).all()
    assert measures.end.tolist() == [FinishReason.LENGTH, FinishReason.STOP] * 4
    assert played.counters.finished == Counter({FinishReason.LENGTH: 4, FinishReason.STOP: 4})


def test_a_turn_comes_after_the_answer_and_finds_it_cached(core, options):
    trace = sessions(3, 4)
    measures, _ = engine(core, options).play(trace, 1)
    turns = np.flatnonzero(trace.follows != NOBODY)
    assert (measures.arrival_ns[turns] >= measures.end_ns[trace.follows[turns]] + 1_000_000).all()
    _, simulated = play_simulated(trace, "cpu", **COMMON)
    assert measures.cached_tokens == simulated.cached_tokens > 0


def test_a_next_prompt_holds_what_was_really_said():
    clients = Clients(sessions(2, 2), VOCAB, "")
    first, second = clients.request(0).prompt_array(), clients.request(2).prompt_array()
    assert first.size == 11
    assert 1 <= first.min() <= first.max() < VOCAB
    for token in range(6):
        assert clients.hear(told([0, 2], [token, 20 + token])) == []
    assert clients.request(1).prompt_array()[:17].tolist() == [*first.tolist(), *range(6)]
    assert clients.request(3).prompt_array()[:17].tolist() == [*second.tolist(), *range(20, 26)]


def test_prompts_with_one_system_begin_alike():
    tickets = np.arange(6)
    systems, shared = tickets // 2 - 1, np.array([0, 0, 7, 7, 9, 9])
    systems[:2] = NOBODY
    trace = make_trace(np.zeros(6), np.full(6, 12), np.full(6, 3), systems=systems, system_tokens=shared)
    clients = Clients(trace, VOCAB, "")
    prompts = [clients.request(ticket).prompt_array() for ticket in range(6)]
    for ticket in (2, 4):
        length = shared[ticket]
        assert (prompts[ticket][:length] == prompts[ticket + 1][:length]).all()
        assert (prompts[ticket][length:] != prompts[ticket + 1][length:]).any()
    assert len({prompt[:7].tobytes() for prompt in prompts}) == 4


def test_who_finds_the_queue_full_is_refused_and_the_next_turn_comes_all_the_same(core, options):
    trace = sessions(12, 2)
    measures, _ = engine(core, options, max_queued_requests=1).play(trace, 1)
    firsts = np.flatnonzero(trace.follows == NOBODY)
    assert (measures.end[firsts] == REFUSED).sum() == 12 - 4 - 1, "all come before the first step"
    assert np.isin(measures.end, (REFUSED, FinishReason.LENGTH)).all()
    assert sum(measures.refusals.values()) == (measures.end == REFUSED).sum()


def test_options_of_scheduling_need_no_engine_of_their_own(options, monkeypatch):
    loaded = []

    class Counted(EngineCore):
        def __init__(self, given: EngineOptions) -> None:
            loaded.append(given)
            super().__init__(given)

    monkeypatch.setattr(live, "EngineCore", Counted)
    base = {name: getattr(options, name) for name in options.__struct_fields__}
    runs = {"a": {}, "b": {"mixed_steps": False}, "c": {"max_batch_tokens": 16}, "d": {"target_inter_token_ms": 3.0}}
    engines = load_engines({name: EngineOptions(**base | given) for name, given in runs.items()}, WallClock())
    assert [each.max_batch_tokens for each in loaded] == [24, 16]
    assert [each.conductor.limits.mixed_steps for each in engines.values()] == [True, False, True, True]
    assert [each.conductor.limits.target_inter_token_ns for each in engines.values()] == [0, 0, 0, 3_000_000]
    trace = make_trace(np.zeros(4), np.full(4, 20), np.full(4, 5))
    for each in engines.values():  # conductors of one engine, one after the other
        measures, _ = each.play(trace, 1)
        assert (measures.end == FinishReason.LENGTH).all()
        assert measures.cached_tokens == 0, "no run finds another's prompts"


def test_options_that_are_shared_with_change_nothing_about_the_model(options):
    changed = {"run_ahead": "on", "mixed_steps": False, "chunked_prefill": False}
    numbers = {name: getattr(options, name) + 1 for name in SHARED_WITH - changed.keys()}
    other = msgspec.structs.replace(options, **changed | numbers)
    assert load_options(other) == load_options(options)
    assert all(getattr(other, name) != getattr(options, name) for name in SHARED_WITH)


def test_what_others_take_of_the_processor_does_not_count_by_its_own_time(core, options, monkeypatch):
    monkeypatch.setattr(time, "process_time_ns", itertools.count(0, 1_000).__next__)  # a microsecond a look
    trace = make_trace(np.array([0.0, 3600.0]), np.full(2, 9), np.full(2, 4))
    measures, _ = engine(core, options, clock=CpuClock()).play(trace, 1_000_000)
    assert measures.arrival_ns.tolist() == [0, 3_600_000_000_000]
    assert (measures.end_ns - measures.arrival_ns).max() < 1_000_000
    assert measures.late_gaps.sum() == 0
