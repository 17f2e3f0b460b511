"""Requests that run out of time, wherever they stand."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.conductor.deadlines import MIN_STEPS, NEVER, Deadlines
from mstar.conductor.request import FinishReason
from mstar.engine.resources.step import AdmitOutcome, AllocationFailed
from mstar.utils.errors import ErrorCode, Unavailable

from .toy import EOS, Bench

TIMEOUT, LENGTH, STOP = FinishReason.TIMEOUT, FinishReason.LENGTH, FinishReason.STOP
all_modes = pytest.mark.parametrize("steps_ahead", [0, 1, 4])


class Ticking(Bench):
    """A bench whose clock moves while a step is collected."""

    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        collect = self.engine.collect

        def slow(handle):
            self.now_ns += 10
            return collect(handle)

        self.engine.collect = slow


@all_modes
def test_a_row_that_runs_ends_with_the_token_that_came_last(steps_ahead):
    bench = Ticking(steps_ahead=steps_ahead)
    late, free = bench.submit([5, 6, 7], 9, deadline_ns=1025), bench.submit([8], 6)
    bench.run()
    assert (bench.outcomes[late].tokens, bench.outcomes[late].finishes) == ([5, 6, 7], [TIMEOUT])
    assert (bench.outcomes[free].tokens, bench.outcomes[free].finishes) == ([8] * 6, [LENGTH])
    counters = bench.conductor.counters
    assert (counters.finished[TIMEOUT], counters.expired, counters.failed) == (1, 0, 0)
    bench.assert_idle()


@all_modes
@pytest.mark.parametrize(("prompt", "expected"), [([5, EOS, 6], STOP), ([5, 6], LENGTH)])
def test_an_end_in_the_very_step_is_told_as_that_end(steps_ahead, prompt, expected):
    bench = Ticking(steps_ahead=steps_ahead)
    rid = bench.submit(prompt, 2, deadline_ns=1015)
    bench.run()
    assert bench.outcomes[rid].finishes == [expected]


@all_modes
def test_between_steps_a_row_ends_without_another(steps_ahead):
    bench = Bench(steps_ahead=steps_ahead)
    rid = bench.submit([5, 6], 9, deadline_ns=2000)
    bench.step()
    bench.step()
    steps = len(bench.echo.steps)
    bench.now_ns = 2000
    bench.step()
    assert bench.outcomes[rid].finishes == [TIMEOUT]
    assert bench.outcomes[rid].tokens == [5, 6]
    bench.run()
    assert len(bench.echo.steps) == steps + steps_ahead  # it runs along in those that were launched
    bench.assert_idle()


def test_in_the_queue_it_fails_and_never_runs():
    bench = Bench(rows=1)
    running, late = bench.submit([5], 9), bench.submit([6], 9, deadline_ns=2000)
    bench.step()
    bench.now_ns = 1999
    bench.step()
    assert bench.conductor.num_queued == 1
    bench.now_ns = 2000
    bench.step()
    (failure,) = bench.outcomes[late].failures
    assert failure.code is ErrorCode.UNAVAILABLE
    assert failure.message.startswith("timeout_ms: ")
    bench.run()
    assert bench.outcomes[running].finishes == [LENGTH]
    assert (bench.conductor.counters.expired, bench.conductor.counters.failed) == (1, 1)
    bench.assert_idle()


def test_a_time_that_is_over_is_refused_at_once():
    bench = Bench()
    with pytest.raises(Unavailable, match="timeout_ms"):
        bench.submit([5], 9, deadline_ns=1000)
    assert bench.conductor.counters.refused["deadline"] == 1
    assert not bench.conductor.has_work()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_time_shorter_than_half_of_the_quickest_step_is_refused_at_once(steps_ahead):
    bench = Ticking(steps_ahead=steps_ahead, rows=2, context=256, pages=64)
    for left in (1, 4, 5):
        bench.submit([5], 1, deadline_ns=bench.now_ns + left)  # nobody knows yet how fast a step can be
    bench.run()
    bench.submit([5], MIN_STEPS + 10)
    bench.run()
    with pytest.raises(Unavailable, match=r"^timeout_ms: at least 0.000 ms before .* 1/2 of the quickest step"):
        bench.submit([5], 9, deadline_ns=bench.now_ns + 4)
    assert bench.conductor.counters.refused["deadline"] == 1
    rid = bench.submit([5], 1, deadline_ns=bench.now_ns + 5)
    bench.run()
    assert bench.outcomes[rid].tokens == [5]
    bench.assert_idle()


def test_one_quick_step_is_enough_to_know_how_fast_a_step_can_be():
    now = 0
    deadlines = Deadlines(lambda: now)
    for took in [80] * MIN_STEPS + [20] + [80] * MIN_STEPS:
        launched, now = now, now + took
        deadlines.landed(launched)
    assert deadlines.shortfall(now + 9) is not None
    assert deadlines.shortfall(now + 10) is None


def test_of_steps_that_overlap_the_time_between_their_landings_counts():
    now = 0
    deadlines = Deadlines(lambda: now)
    for _ in range(MIN_STEPS):  # each is launched 50 before the one ahead of it lands
        launched, now = max(now - 50, 0), now + 60
        deadlines.landed(launched)
    assert deadlines.shortfall(now + 29) is not None
    assert deadlines.shortfall(now + 30) is None


def test_in_a_long_queue_only_those_whose_time_is_over_are_looked_at():
    bench = Bench(rows=1, queued=1000)
    bench.submit([5], 60)
    ids = [bench.submit([6], 1, deadline_ns=2000 + 10 * (number % 50)) for number in range(200)]
    bench.submit([7], 1)
    bench.step()
    lobby = bench.conductor._lobby
    removed, remove = [], lobby.remove
    lobby.remove = lambda rid: (removed.append(rid), remove(rid))[1]
    bench.now_ns = 2015
    bench.step()
    late = {rid for number, rid in enumerate(ids) if number % 50 < 2}
    assert set(removed) == late == {rid for rid in ids if bench.outcomes[rid].failures}
    bench.conductor.cancel(ids[2])
    bench.now_ns = 2500
    bench.run()
    assert all(bench.outcomes[rid].num_ends == 1 for rid in ids)
    bench.assert_idle()


def test_deadlines_of_those_that_have_left_take_no_room():
    bench = Bench()
    for _ in range(1000):
        bench.submit([5], 1, deadline_ns=10**9)
        bench.run()
    assert len(bench.conductor._lobby._deadlines) <= 66


@all_modes
def test_a_row_that_is_held_back_ends_too(steps_ahead):
    bench = Bench(steps_ahead=steps_ahead)
    old, new = bench.submit([5], 9), bench.submit([6], 9, deadline_ns=2000)
    bench.step()
    bench.mood.moods = iter([AdmitOutcome(ok=False, reason=AllocationFailed("no room"))])
    bench.step()
    bench.step()
    assert bench.echo.steps[-1][1] == (old,)
    bench.now_ns = 2000
    bench.step()
    assert bench.outcomes[new].finishes == [TIMEOUT]
    bench.run()
    assert bench.outcomes[old].tokens == [5] * 9
    bench.assert_idle()


def test_a_row_that_waits_for_its_turn_ends_too():
    bench = Bench(rows=4, largest_batch=1)
    ids = [bench.submit([5], 9, deadline_ns=2000 if n else 0) for n in range(4)]
    bench.step()
    bench.now_ns = 2000
    bench.step()
    failures = [[failure.code for failure in bench.outcomes[rid].failures] for rid in ids]
    assert failures == [[], *[[ErrorCode.UNAVAILABLE]] * 3]  # none of them has run yet
    assert bench.conductor.counters.expired == 3


def test_a_row_given_away_in_flight_keeps_its_new_owners_time():
    bench = Bench(rows=1, steps_ahead=1)
    first = bench.submit([5], 9)
    bench.step()
    bench.conductor.cancel(first)
    second = bench.submit([6], 9, deadline_ns=2000)
    bench.now_ns = 2000
    bench.run()
    assert bench.outcomes[second].finishes == [TIMEOUT]
    bench.assert_idle()


def test_the_clock_is_not_asked_while_nobody_has_a_deadline():
    def asked():
        raise AssertionError("nobody has a deadline")

    deadlines = Deadlines(asked)
    assert not deadlines.are_due()


def test_the_bound_is_the_earliest_of_those_that_are_left():
    now = 0
    deadlines = Deadlines(lambda: now)
    for each in (30, 10, 20):
        deadlines.add(each)
    now = 9
    assert not deadlines.are_due()
    now = 10
    assert deadlines.are_due()
    deadlines.reset(30, 20)
    assert not deadlines.are_due()
    now = 20
    assert deadlines.are_due()
    deadlines.reset(NEVER)
    now = NEVER
    assert not deadlines.are_due()


def test_deadlines_of_requests_that_ended_cost_one_look_at_most():
    bench = Bench()
    bench.submit([5], 1, deadline_ns=2000)
    rid = bench.submit([5], 20, deadline_ns=9000)
    bench.step()
    looks = []
    expire = bench.conductor._expire
    bench.conductor._expire = lambda: (looks.append(1), expire())
    bench.now_ns = 3000
    for _ in range(5):
        bench.step()
    assert len(looks) == 1
    bench.run()
    assert bench.outcomes[rid].finishes == [LENGTH]
    assert np.all(bench.conductor._table.deadline_ns == NEVER)
