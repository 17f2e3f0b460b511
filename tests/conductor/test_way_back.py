"""Whether a request that gives its pages up comes back from the host or runs its tokens again."""

from __future__ import annotations

import pytest

from mstar.conductor.step_times import StepTimes
from mstar.conductor.way_back import AUTO, FORGETTING, OFFLOAD, RECOMPUTE, WayBack

from .test_pressure import overcommitted, run_until_somebody_is_away, solo

US = 1_000


def learnt(token_us: int) -> StepTimes:
    times = StepTimes()
    times.landed(100 * US, 0)
    times.landed((100 + 50 * token_us) * US, 50)
    return times


def test_a_prompt_token_costs_what_steps_took_beyond_one_without():
    times = StepTimes()
    assert times.prompt_token_ns is None
    times.landed(100, 10)  # no base yet
    assert times.prompt_token_ns == 10
    assert learnt(3).prompt_token_ns == 3 * US


@pytest.mark.parametrize("way", [OFFLOAD, RECOMPUTE])
def test_a_way_that_was_asked_for_is_taken_whatever_it_costs(way):
    way_back = WayBack(way, learnt(1))
    way_back.moved(10, 10 * 10**9, False)
    assert way_back.is_host() is (way == OFFLOAD)
    assert WayBack(way, learnt(10**6)).is_host() is (way == OFFLOAD)


@pytest.mark.parametrize(
    ("out_us", "back_us", "is_host"), [(4, None, True), (6, None, False), (6, 3, True), (2, 9, False)]
)
def test_the_cheaper_way_is_taken(out_us, back_us, is_host):
    way_back = WayBack(AUTO, learnt(10))
    assert way_back.is_host()  # nothing is known of it
    way_back.moved(50, 50 * out_us * US, False)
    if back_us is not None:
        way_back.moved(50, 50 * back_us * US, True)
    assert way_back.is_host() is is_host


def test_a_way_that_cost_more_is_tried_again_some_day():
    way_back = WayBack(AUTO, learnt(10))
    way_back.moved(1, 20 * US, False)
    assert sum(not way_back.is_host() for _ in range(200)) == pytest.approx(69, abs=1)
    assert 2 * 20 * FORGETTING**69 < 10


def test_running_again_that_is_cheaper_leaves_the_host_alone():
    bench = overcommitted(mixed=True, cpu_offload_pages=16, pages=12, context=48)
    conductor, moved = bench.conductor, []
    real = conductor._engine.offload

    def slow(info):  # a second that nothing else takes
        moved.append(info.request_id)
        bench.now_ns += 10**9
        return real(info)

    conductor._engine.offload = slow
    prompts = [[10 + i, 20] for i in range(4)]
    ids = [bench.submit(prompt, 40) for prompt in prompts]
    run_until_somebody_is_away(bench)
    bench.run()
    assert [bench.outcomes[each].tokens for each in ids] == [solo(prompt, 40) for prompt in prompts]
    counters = conductor.counters
    assert len(moved) == counters.offloads == 1
    assert counters.preemptions > 1
    assert counters.recomputed_tokens > 0
    bench.assert_idle()
