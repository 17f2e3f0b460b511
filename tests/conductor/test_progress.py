"""Something runs, or somebody is told why not: what happens should the conductor itself be wrong about that."""

from __future__ import annotations

import itertools

import pytest

from mstar.conductor.progress import MORE_CALLS, MOST_IDLE_CALLS, MOST_IDLE_CALLS_ASSERTED
from mstar.conductor.request import Guide
from mstar.engine.resources.step import AdmitOutcome
from mstar.utils.errors import ErrorCode

from .toy import Bench

NOT_READY = AdmitOutcome(ready=False)


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.setenv("MSTAR_PROGRESS_ASSERTS", "0")


def call(bench, times):
    return [bench.step() for _ in range(times)]


@pytest.mark.parametrize("steps_ahead", [0, 1, 4])
def test_a_conductor_that_stands_still_raises_in_tests(steps_ahead):
    bench = Bench(steps_ahead=steps_ahead)
    bench.submit([5, 6], 4)
    call(bench, 2)
    bench.mood.moods = itertools.repeat(NOT_READY)
    with pytest.raises(AssertionError, match=r"1 requests have rows, of which 1 could run.*KV pages are free"):
        call(bench, MOST_IDLE_CALLS_ASSERTED + 2)


@pytest.mark.parametrize("steps_ahead", [0, 1, 4])
def test_serving_it_ends_one_request_after_the_other_and_says_why(serving, steps_ahead):
    bench = Bench(steps_ahead=steps_ahead)
    old, new = bench.submit([5, 6], 4), bench.submit([7, 8], 4)
    low = bench.submit([9], 4, request_priority=-1)
    bench.mood.moods = itertools.repeat(NOT_READY)
    call(bench, MOST_IDLE_CALLS - MORE_CALLS)
    for ended in (low, new, old):
        assert not bench.outcomes[ended].failures
        call(bench, MORE_CALLS)
        (failure,) = bench.outcomes[ended].failures
        assert failure.code is ErrorCode.INTERNAL
        assert "found nothing to run for this request; " in failure.message
    bench.assert_idle()


def test_one_that_leaves_may_get_the_others_going(serving):
    bench = Bench()
    old, new = bench.submit([5, 6], 4), bench.submit([7, 8], 4)
    bench.mood.moods = itertools.repeat(NOT_READY, MOST_IDLE_CALLS)
    bench.run(MOST_IDLE_CALLS + 20)
    assert len(bench.outcomes[new].failures) == 1
    assert bench.outcomes[old].tokens == [5, 6, 5, 6]
    bench.assert_idle()


def test_a_head_that_never_joins_ends_too(serving, monkeypatch):
    bench = Bench()
    monkeypatch.setattr(bench.conductor._entrance, "admits_at_once", lambda waiting: False)
    monkeypatch.setattr(bench.conductor._entrance._joining, "next", lambda: None)
    stuck = bench.submit([5], 2)
    call(bench, MOST_IDLE_CALLS)
    (failure,) = bench.outcomes[stuck].failures
    assert "0 requests have rows" in failure.message
    assert "1 wait" in failure.message
    bench.assert_idle()


def test_a_little_waiting_is_no_standstill():
    bench = Bench()
    ids = [bench.submit([5, 6], 3) for _ in range(3)]
    bench.mood.moods = itertools.chain(
        *(
            itertools.chain(itertools.repeat(NOT_READY, MOST_IDLE_CALLS_ASSERTED - 1), [AdmitOutcome()])
            for _ in range(3)
        )
    )
    bench.run()
    assert all(bench.outcomes[each].tokens == [5, 6, 5] for each in ids)


def test_neither_is_a_grammar_that_takes_long_to_compile():
    bench = Bench()
    slow = bench.submit([5, 6], 2, guide=Guide("regex", "slow"))
    for _ in range(3 * MOST_IDLE_CALLS_ASSERTED):
        bench.conductor.step()
    bench.grammars.may_prepare.set()
    bench.run()
    assert bench.outcomes[slow].tokens == [5, 6]


def test_nothing_to_do_is_none():
    bench = Bench()
    call(bench, 3 * MOST_IDLE_CALLS_ASSERTED)
