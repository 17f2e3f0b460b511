"""Steps launched before the last one's tokens came: the same results, one step later."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.request import FinishReason
from mstar.engine.resources.step import AdmitOutcome, AdmitRuntimeError, AllocationFailed
from mstar.utils.errors import Unavailable

from .toy import BAD_INPUT, EOS, FAULT, RAISES, Bench

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED
NOT_READY = AdmitOutcome(ok=True, ready=False)
FULL = AdmitOutcome(ok=False, reason=AllocationFailed("no room"))


def ahead(**fields) -> Bench:
    return Bench(steps_ahead=1, **fields)


class Order:
    """Notes in which order steps are launched and collected."""

    def __init__(self, bench: Bench) -> None:
        self.calls: list[str] = []
        self.most_in_flight = in_flight = 0
        launch, collect = bench.engine.launch, bench.engine.collect

        def noted_launch(batch):
            nonlocal in_flight
            self.calls.append("launch")
            handle = launch(batch)
            in_flight += bool(handle.request_ids)
            self.most_in_flight = max(self.most_in_flight, in_flight)
            return handle

        def noted_collect(handle):
            nonlocal in_flight
            self.calls.append("collect")
            in_flight -= 1
            return collect(handle)

        bench.engine.launch, bench.engine.collect = noted_launch, noted_collect


def test_the_next_step_is_launched_before_the_last_is_collected():
    bench = ahead()
    order = Order(bench)
    rid = bench.submit([5, 6], 4)
    bench.run()
    assert order.calls == ["launch", *["launch", "collect"] * 3, "collect"]
    assert order.most_in_flight == 2
    assert bench.outcomes[rid].tokens == [5, 6, 5, 6]


def test_off_every_step_is_collected_at_once():
    bench = Bench()
    order = Order(bench)
    bench.submit([5, 6], 3)
    bench.run()
    assert order.calls == ["launch", "collect"] * 3


def test_tokens_come_one_call_later_and_there_is_work_until_then():
    bench = ahead()
    rid = bench.submit([5], 1)
    report = bench.step()
    assert (report.request_ids.size, report.num_stepped) == (0, 1)
    assert bench.conductor.has_work()
    report = bench.step()
    assert (report.tokens.tolist(), report.num_stepped) == ([5], 0)
    assert bench.outcomes[rid].finishes == [LENGTH]
    assert not bench.conductor.has_work()
    bench.assert_idle()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_budget_is_known_ahead_so_nothing_is_made_in_vain(max_tokens):
    bench = ahead()
    rid = bench.submit([5, 6], max_tokens)
    bench.run()
    assert bench.echo.steps == [("prefill", (rid,)), *[("decode", (rid,))] * (max_tokens - 1)]
    assert bench.conductor.counters.discarded_tokens == 0


def test_the_token_after_a_stop_is_made_and_dropped():
    bench = ahead()
    stopped, other = bench.submit([5, EOS, 7], 9), bench.submit([6], 6)
    bench.run()
    assert (bench.outcomes[stopped].tokens, bench.outcomes[stopped].finishes) == ([5], [STOP])
    assert bench.outcomes[other].tokens == [6] * 6
    assert sum(stopped in rows for _, rows in bench.echo.steps) == 3
    counters = bench.conductor.counters
    assert (counters.discarded_tokens, counters.generated_tokens) == (1, 7)
    bench.assert_idle()


def test_a_stop_in_the_last_token_but_one_makes_none_in_vain():
    bench = ahead()
    bench.submit([5, EOS], 2)
    bench.run()
    assert bench.conductor.counters.discarded_tokens == 0


@pytest.mark.parametrize("end", ["cancel", "finish", "fail_all"])
def test_a_request_that_ends_in_flight_leaves_at_once_and_is_heard_of_no_more(end):
    bench = ahead()
    rid = bench.submit([5, 6, 7], 9)
    for _ in range(3):
        bench.step()
    seen = list(bench.outcomes[rid].tokens)
    match end:
        case "cancel":
            bench.conductor.cancel(rid)
        case "finish":
            bench.conductor.finish(rid, len(seen))
        case "fail_all":
            bench.conductor.fail_all(Unavailable("shutting down"))
    assert bench.conductor.num_running == 0
    assert bench.kv.free_pages == bench.kv.num_usable_pages
    assert bench.conductor.has_work()
    bench.run()
    assert bench.outcomes[rid].tokens == seen == [5, 6]
    assert bench.conductor.counters.discarded_tokens == 1
    bench.assert_idle()


def test_a_row_given_away_while_its_last_step_is_in_flight_reports_for_its_new_owner_only():
    bench = ahead(rows=1)
    first = bench.submit([5], 9)
    bench.step()
    bench.conductor.cancel(first)
    second = bench.submit([6, 7], 3)
    assert bench.conductor.num_running == 1
    bench.run()
    assert (bench.outcomes[first].tokens, bench.outcomes[second].tokens) == ([], [6, 7, 6])
    bench.assert_idle()


def test_broken_logits_fail_their_row_though_it_runs_along_once_more():
    bench = ahead()
    bad, good = bench.submit([5, FAULT, 5], 5), bench.submit([5, 6], 5)
    bench.run()
    assert (bench.outcomes[bad].tokens, len(bench.outcomes[bad].failures)) == ([5], 1)
    assert bench.outcomes[good].tokens == [5, 6, 5, 6, 5]
    assert bench.conductor.counters.row_faults == 1
    bench.assert_idle()


def test_a_step_that_fails_is_handled_after_the_tokens_before_it():
    bench = ahead()
    stopped, broken = bench.submit([EOS, RAISES], 5), bench.submit([5, RAISES], 5)
    bench.run()
    assert bench.outcomes[stopped].finishes == [STOP]  # not the error of the step it ran along in
    assert not bench.outcomes[stopped].failures
    assert bench.outcomes[broken].tokens == [5]
    assert "the forward broke" in bench.outcomes[broken].failures[0].message
    bench.assert_idle()


def test_a_launch_that_raises_fails_its_rows_and_the_engine_goes_on():
    bench = ahead()
    rid = bench.submit([5, 6], 5)
    bench.step()
    launch = bench.engine.launch
    bench.engine.launch = lambda batch: (_ for _ in ()).throw(KeyError("lost"))
    bench.step()
    bench.engine.launch = launch
    assert bench.outcomes[rid].tokens == [5]
    assert "lost" in bench.outcomes[rid].failures[0].message
    later = bench.submit([7], 2)
    bench.run()
    assert bench.outcomes[later].tokens == [7, 7]
    bench.assert_idle()


def test_a_collect_that_raises_fails_the_rows_of_its_step():
    bench = ahead()
    bench.submit([5, 6], 5)
    bench.step()
    bench.engine.collect = lambda handle: (_ for _ in ()).throw(RuntimeError("device lost"))
    bench.step()
    assert "device lost" in bench.outcomes[0].failures[0].message
    assert bench.conductor.num_running == 0


# Several steps in the device's queue, while all they need is there.


def landed_and_launched(bench: Bench) -> tuple[int, int]:
    """Tokens of the first request, and steps."""
    return len(bench.outcomes[0].tokens), len(bench.echo.steps)


def test_steps_are_queued_up_to_the_bound_and_then_one_for_each_that_lands():
    bench = Bench(steps_ahead=3)
    bench.submit([5], 30)
    seen = [bench.step() and landed_and_launched(bench) for _ in range(6)]
    assert seen == [(0, 1), (1, 2), (2, 5), (3, 6), (4, 7), (5, 8)]
    bench.run()
    assert bench.outcomes[0].tokens == [5] * 30
    assert len(bench.echo.steps) == 30, "the last token of the budget is known ahead"
    bench.assert_idle()


def test_an_arrival_joins_the_next_step_that_is_launched_and_the_queue_is_short_while_somebody_waits():
    bench = Bench(steps_ahead=3, rows=2)
    bench.submit([5], 40)
    for _ in range(4):
        bench.step()
    for _ in range(2):
        bench.submit([6], 3)  # one finds a row, one waits
    depths = []
    while bench.conductor.num_queued:
        bench.step()
        tokens, steps = landed_and_launched(bench)
        depths.append(steps - tokens)
    assert depths[:2] == [2, 1]
    assert set(depths) == {1, 2}, "the prompt's own step counts"
    bench.run()
    assert [len(bench.outcomes[i].tokens) for i in range(3)] == [40, 3, 3]
    bench.assert_idle()


def test_tokens_behind_a_stop_are_dropped_however_many_steps_ran_along():
    bench = Bench(steps_ahead=4)
    stopped, goes_on = bench.submit([5, 6, 5, 6, 5, 6, EOS, 6, 5, 6], 9), bench.submit([7], 20)
    bench.run()
    assert bench.outcomes[stopped].tokens == [5, 6, 5, 6, 5, 6]
    assert bench.outcomes[stopped].finishes == [STOP]
    assert bench.outcomes[goes_on].tokens == [7] * 20
    assert 1 < bench.conductor.counters.discarded_tokens <= 4
    bench.assert_idle()


def test_what_a_queued_launch_could_not_run_is_told_once_the_steps_before_it_have_landed():
    bench = Bench(steps_ahead=4)
    rid = bench.submit([5, 6, 5, 6, 5, 6, RAISES], 9)
    bench.run()
    assert bench.outcomes[rid].tokens == [5, 6, 5, 6, 5, 6]
    assert "the forward broke" in bench.outcomes[rid].failures[0].message
    bench.assert_idle()


@pytest.mark.parametrize("steps_ahead", [0, 1, 4])
def test_an_admission_that_is_not_ready_is_asked_again(steps_ahead):
    bench = Bench(steps_ahead=steps_ahead)
    rid = bench.submit([5, 6], 4)
    bench.mood.moods = iter([NOT_READY, NOT_READY])
    bench.run()
    assert bench.outcomes[rid].tokens == [5, 6, 5, 6]
    assert bench.conductor.counters.refused_admissions == 2


@pytest.mark.parametrize("steps_ahead", [0, 1, 4])
def test_a_refused_row_waits_until_another_leaves(steps_ahead):
    bench = Bench(steps_ahead=steps_ahead)
    old, new = bench.submit([5], 5), bench.submit([6], 5)
    bench.step()
    bench.mood.moods = iter([FULL])
    bench.run()
    assert [len(bench.outcomes[rid].tokens) for rid in (old, new)] == [5, 5]
    alone = [rows for walk, rows in bench.echo.steps if len(rows) == 1]
    assert alone[0] == (old,)
    bench.assert_idle()


def test_a_refusal_that_a_departure_has_answered_holds_nobody():
    bench = ahead()
    stopped, other = bench.submit([5, EOS], 9), bench.submit([6], 6)
    bench.step()
    bench.step()  # the stop is in flight now
    bench.mood.moods = iter([FULL])
    bench.step()
    assert bench.outcomes[stopped].finishes == [STOP]
    bench.run()
    assert len(bench.outcomes[other].tokens) == 6


@pytest.mark.parametrize("steps_ahead", [0, 1, 4])
def test_an_admission_that_can_never_be_fails_the_request_it_names(steps_ahead):
    bench = Bench(steps_ahead=steps_ahead)
    bad, good = bench.submit([5], 5), bench.submit([6], 5)
    bench.step()
    bench.mood.moods = iter([AdmitOutcome(ok=False, reason=AdmitRuntimeError("too long", bad))])
    bench.run()
    assert "too long" in bench.outcomes[bad].failures[0].message
    assert bench.outcomes[good].tokens == [6] * 5


def test_an_unchanged_set_of_rows_is_the_same_batch_object_also_ahead():
    bench = ahead()
    for _ in range(3):
        bench.submit([5], 9)
    seen = []
    launch = bench.engine.launch
    bench.engine.launch = lambda batch: (seen.append(batch), launch(batch))[1]
    for _ in range(6):
        bench.step()
    assert len({id(batch) for batch in seen}) == 2  # prefill, decode


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_the_step_that_is_planned_ahead_is_the_one_that_is_launched_next(monkeypatch, steps_ahead):
    monkeypatch.setenv("MSTAR_PRE_PLAN_SPEC", "1")
    bench = Bench(steps_ahead=steps_ahead)
    calls = []
    launch, pre_plan = bench.engine.launch, bench.engine.pre_plan
    bench.engine.launch = lambda batch: (calls.append(("launch", batch)), launch(batch))[1]
    bench.engine.pre_plan = lambda batch: (calls.append(("plan", batch)), pre_plan(batch))[1]
    ids = [bench.submit([5, 6, EOS], 6), bench.submit([7], 5)]
    bench.run()
    assert [bench.outcomes[rid].tokens for rid in ids] == [[5, 6], [7] * 5]
    planned = [
        after[1] is before[1]
        for before, after in itertools.pairwise(calls)
        if (before[0], after[0]) == ("plan", "launch")
    ]
    assert len(planned) >= 4
    assert all(planned)
    bench.assert_idle()


def test_nothing_is_planned_ahead_unless_asked_for():
    bench = ahead()
    bench.engine.pre_plan = None
    bench.submit([5], 4)
    bench.run()


def test_prefix_chains_get_what_was_emitted_and_nothing_else():
    bench = ahead()
    chains: dict[int, list[int]] = {}

    ingest, request_at = bench.engine.ingest, {}

    def seat(info):
        ingest(info)
        request_at[info.row] = info.request_id

    def note(rows, tokens):
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            chains.setdefault(request_at[row], []).append(token)

    bench.engine.ingest = seat

    bench.engine.extend_prefix_chains = note
    bench.submit([5, 6, EOS, 7], 9)
    bench.submit([5, 6, 7], 4)
    bench.submit([5, FAULT], 4)
    cancelled = bench.submit([8, 9], 9)
    for _ in range(3):
        bench.step()
    bench.conductor.cancel(cancelled)
    bench.run()
    assert chains == {rid: outcome.tokens for rid, outcome in bench.outcomes.items()}


def test_a_step_of_an_unchanged_batch_costs_no_python_per_row():
    def calls(rows: int) -> int:
        """Calls made by the conductor's own code in one step."""
        bench = ahead(rows=rows, pages=rows * 2, batch_tokens=4096)
        for _ in range(rows):
            bench.submit([5, 6], 20)
        for _ in range(4):
            bench.step()
        count = 0

        def profile(frame, event, arg):
            nonlocal count
            count += event in ("call", "c_call") and "mstar/conductor" in frame.f_code.co_filename

        sys.setprofile(profile)
        try:
            bench.conductor.step()
        finally:
            sys.setprofile(None)
        return count

    assert calls(128) == calls(8)


def test_arrays_of_a_report_are_of_one_length():
    bench = ahead()
    for token in (5, EOS, 7):
        bench.submit([token, 8], 3)
    for _ in range(6):
        report = bench.step()
        sizes = {getattr(report, name).size for name in ("request_ids", "clients", "tickets", "tokens", "finish")}
        assert len(sizes) == 1
        assert report.tokens.dtype == np.int32


# The same results in every mode.


@dataclass(frozen=True)
class Request:
    """``leave_after``: tokens its client sees before it cancels (or, ``by_finish``, is content); None stays."""

    arrives: int
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    stop_ids: tuple[int, ...]
    leave_after: int | None
    by_finish: bool


COMMON = {
    "arrives": st.integers(0, 30),
    "max_tokens": st.integers(0, 25),
    "ignore_eos": st.booleans(),
    "stop_ids": st.sampled_from([(), (), (7,), (3, 11)]),
    "by_finish": st.booleans(),
}
HEALTHY = st.builds(
    Request,
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20).map(tuple),
    leave_after=st.one_of(st.none(), st.integers(1, 12)),
    **COMMON,
)
# Their clients stay: an error of the step ahead comes with the token after which they would have left.
BROKEN = st.builds(
    Request, prompt=st.sampled_from([(BAD_INPUT, 5), (5, 6, FAULT), (5, RAISES)]), leave_after=st.none(), **COMMON
)
REQUEST = st.one_of(HEALTHY, HEALTHY, BROKEN)


@dataclass
class Played:
    """``outcomes``: (tokens, finishes, errors) and ``steps``: how often it ran, each by the request's number."""

    outcomes: dict[int, tuple[list[int], list[int], list[str]]]
    steps: dict[int, int]
    bench: Bench


def play(requests: list[Request], moods: list[bool], **fields) -> Played:
    """Runs all requests, with clients that leave when they have seen enough."""
    bench = Bench(pages=14, page_size=4, context=48, rows=5, queued=1000, batch_tokens=24, **fields)
    bench.mood.moods = (NOT_READY if refuse else AdmitOutcome() for refuse in moods)
    ids: dict[int, int] = {}
    open_clients: set[int] = set()
    for step in range(5000):
        for number, request in enumerate(requests):
            if request.arrives == step:
                ids[number] = bench.submit(
                    request.prompt, request.max_tokens, ignore_eos=request.ignore_eos, stop_ids=request.stop_ids
                )
                open_clients.add(number)
        if step > 30 and not bench.conductor.has_work():
            break
        bench.step()
        for number in sorted(open_clients):
            request, outcome = requests[number], bench.outcomes[ids[number]]
            if request.leave_after is not None and len(outcome.tokens) >= request.leave_after and not outcome.num_ends:
                open_clients.remove(number)
                if request.by_finish:
                    bench.conductor.finish(ids[number], request.leave_after)
                else:
                    bench.conductor.cancel(ids[number])
        assert fields["admission_fit"] != "sum" or bench.kv.promised_pages <= bench.kv.free_pages
    ran = Counter(rid for _, rows in bench.echo.steps for rid in rows)
    outcomes = {number: bench.outcomes[rid] for number, rid in ids.items()}
    return Played(
        {
            n: (each.tokens, each.finishes, [failure.message for failure in each.failures])
            for n, each in outcomes.items()
        },
        {number: ran[rid] for number, rid in ids.items()},
        bench,
    )


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=14),
    moods=st.lists(st.booleans(), max_size=60),
    bench=st.fixed_dictionaries(
        {
            "largest_batch": st.sampled_from([None, None, 3]),
            "admission_fit": st.sampled_from(["sum", "sum", "peak"]),
            "admission_order": st.sampled_from(["fifo", "backfill"]),
            "prefix_cache": st.booleans(),
        }
    ),
)
def test_every_mode_gives_the_same_tokens_ends_and_pages(requests, moods, bench):
    plain = play(requests, moods, **bench)
    plain.bench.assert_idle()
    for steps_ahead, mixed in ((1, False), (0, True), (1, True), (4, True)):
        other = play(requests, moods, steps_ahead=steps_ahead, mixed=mixed, **bench)
        other.bench.assert_idle()
        assert other.outcomes == plain.outcomes
        for name in ("generated_tokens", "finished", "failed", "prompt_tokens", "row_faults"):
            assert getattr(other.bench.conductor.counters, name) == getattr(plain.bench.conductor.counters, name), name
        for number, steps in other.steps.items():
            assert plain.steps[number] <= steps <= plain.steps[number] + steps_ahead
