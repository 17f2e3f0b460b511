"""Prompts that begin alike are computed once, also when they come at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.request import FinishReason
from mstar.engine.resources.step import AdmitOutcome, AllocationFailed

from .toy import RAISES, Bench

PAGE = 16


class Prompts(Bench):
    """A bench that counts the prompt tokens which were run."""

    def __init__(self, **fields) -> None:
        super().__init__(
            **{"pages": 400, "page_size": PAGE, "context": 512, "rows": 16, "batch_tokens": 512, "chunked": True}
            | fields
        )

        self.num_resumed = 0  # that had generated something
        resume = self.engine.resume

        def noted(info, prompt_ids, configs, has_generated):
            self.num_resumed += has_generated
            resume(info, prompt_ids, configs, has_generated)

        self.engine.resume = noted

    @property
    def computed(self) -> int:
        """All tokens of all steps, less those that rows fed back: of each request all it generated but the last."""
        run = sum(sum(spans) for spans in self.echo.spans)
        return run - sum(max(len(outcome.tokens) - 1, 0) for outcome in self.outcomes.values())

    @property
    def first_steps(self) -> dict[int, int]:
        """By request, the number of the first step that ran it."""
        found: dict[int, int] = {}
        for number, (_, ids) in enumerate(self.echo.steps):
            for rid in ids:
                found.setdefault(rid, number)
        return found


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Equal beginnings for equal seeds; no token ends anything."""
    return [10 + (number * (seed + 3) + seed) % 29 for number in range(tokens)]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_sixteen_copies_of_one_prompt_compute_it_once(steps_ahead, mixed):
    bench = Prompts(steps_ahead=steps_ahead, mixed=mixed)
    ids = [bench.submit(prompt(200), 1) for _ in range(16)]
    bench.run()
    assert all(bench.outcomes[rid].tokens == prompt(1) for rid in ids)
    assert bench.computed == 200 + 15 * 8  # the page that is not full; 3,200 without waiting
    counters = bench.conductor.counters
    assert (counters.prompt_tokens, counters.cached_prompt_tokens) == (3200, 15 * 192)
    assert set(bench.first_steps.values()) == {0, 1}
    bench.assert_idle()


def test_what_follows_the_common_beginning_is_everybodys_own():
    bench = Prompts()
    prompts = [prompt(160) + prompt(30 + number, number) for number in range(8)]
    ids = [bench.submit(each, 5) for each in prompts]
    bench.run()
    assert [bench.outcomes[rid].tokens for rid in ids] == [each[:5] for each in prompts]
    assert bench.computed == 160 + sum(30 + number for number in range(8))
    bench.assert_idle()


def test_a_prompt_in_parts_is_waited_for_to_its_end():
    bench = Prompts(batch_tokens=128)
    ids = [bench.submit(prompt(300), 2) for _ in range(4)]
    bench.run()
    assert bench.computed == 300 + 3 * 12
    # The third part is in step 2; then the first one's second token.
    assert [bench.first_steps[rid] for rid in ids] == [0, 4, 4, 4]
    assert {rid for _, ids in bench.echo.steps for rid in ids} == set(ids)


def test_what_followers_compute_themselves_counts_in_the_room_for_prompts():
    bench = Prompts(batch_tokens=128, pages=4000, context=1024)
    system = prompt(96)
    for number in range(16):
        bench.submit(system + prompt(8 if number == 0 else 800, number + 1), 4)
    assert bench.conductor.num_running == 2
    urgent = bench.submit(prompt(100, 40), 2, request_priority=100)
    for _ in range(14):
        bench.step()
    assert bench.outcomes[urgent].tokens


def test_one_that_comes_while_it_is_computed_waits_too():
    bench = Prompts(batch_tokens=64)
    bench.submit(prompt(300), 2)
    bench.step()
    bench.submit(prompt(300), 2)
    bench.run()
    assert bench.computed == 312


def test_those_that_share_more_with_each_other_compute_that_once_too():
    bench = Prompts()
    system, chat = prompt(128), prompt(128, 1)
    bench.submit(system + prompt(40, 2), 1)
    for number in range(3):
        bench.submit(system + chat + prompt(20, 3 + number), 1)
    bench.run()
    assert bench.computed == 168 + 148 + 20 + 20


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        pytest.param({"tenant": "a"}, {"tenant": "b"}, id="another tenant"),
        pytest.param({}, {"cache_salt": "x"}, id="another salt"),
        pytest.param({"no_cache": True}, {}, id="leaves nothing"),
        pytest.param({}, {"no_cache": True}, id="reads nothing"),
        pytest.param({"num_prompt_logprobs": 0}, {}, id="needs all logits"),
    ],
)
def test_nobody_waits_for_pages_that_it_would_not_get(fields, other):
    bench = Prompts()
    bench.submit(prompt(200), 1, **fields)
    bench.submit(prompt(200), 1, **other)
    bench.run()
    assert bench.computed == 400
    assert set(bench.first_steps.values()) == {0}


def test_a_few_tokens_are_not_worth_a_step():
    bench = Prompts()
    for number in range(4):
        bench.submit(prompt(60) + prompt(60, number), 1)
    bench.run()
    assert set(bench.first_steps.values()) == {0}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_when_the_first_leaves_the_next_one_computes_it_for_the_others(how):
    bench = Prompts(batch_tokens=64)
    first = bench.submit(prompt(300), 2, deadline_ns=bench.now_ns + 5 if how == "deadline" else 0)
    others = [bench.submit(prompt(300), 2) for _ in range(3)]
    bench.step()
    if how == "cancel":
        bench.conductor.cancel(first)
    else:
        bench.now_ns += 10
    bench.run()
    assert all(bench.outcomes[rid].finishes == [FinishReason.LENGTH] for rid in others)
    assert bench.computed == 300 + 2 * 12  # the page and part of one that the first had brought are still there
    bench.assert_idle()


def test_a_first_that_breaks_takes_nobody_along():
    bench = Prompts()
    first = bench.submit([RAISES, *prompt(199)], 2)
    others = [bench.submit([RAISES, *prompt(199)], 2), bench.submit(prompt(200), 2)]
    bench.run()
    assert bench.outcomes[first].failures
    assert bench.outcomes[others[0]].failures
    assert bench.outcomes[others[1]].finishes == [FinishReason.LENGTH]
    bench.assert_idle()


def test_nobody_waits_for_a_row_that_is_held():
    """The first one's step finds no page, so it sits out until somebody leaves."""
    bench = Prompts()
    bench.mood.moods = iter([AdmitOutcome(ok=False, reason=AllocationFailed("no page", 1, "main", -1))])
    first, second = bench.submit(prompt(200), 2), bench.submit(prompt(200), 2)
    bench.step()
    bench.step()
    assert bench.first_steps == {second: 0}
    bench.run()
    assert all(bench.outcomes[rid].tokens == prompt(2) for rid in (first, second))
    bench.assert_idle()


def test_one_that_comes_while_the_first_is_held_does_not_wait():
    bench = Prompts(mixed=True)
    bench.submit(prompt(40, 9), 9)
    bench.step()
    refusal = AdmitOutcome(ok=False, reason=AllocationFailed("no page", 1, "main", -1))
    bench.mood.moods = iter([refusal])
    first = bench.submit(prompt(200), 2)
    bench.step()
    assert bench.conductor._table.is_held.any()
    second = bench.submit(prompt(200), 2)
    assert not bench.conductor._table.follows.count
    bench.run()
    assert bench.first_steps[second] < bench.first_steps[first]


def test_what_others_bring_while_one_is_away_counts_as_cached():
    bench = Prompts(batch_tokens=64, admission_fit="none", pages=38)  # of two, one that is away has to wait
    first = bench.submit(prompt(300), 2, request_priority=-1)
    second = bench.submit(prompt(300), 2)
    table = bench.conductor._table
    while second not in table.row_of:
        bench.step()
    rows = np.array([table.row_of[first], table.row_of[second]])
    assert bench.conductor._pressure.give_way(rows)
    bench.run()
    assert bench.outcomes[first].tokens == bench.outcomes[second].tokens == prompt(2)
    counters = bench.conductor.counters
    assert counters.preemptions == 1
    assert (counters.cached_prompt_tokens, counters.recomputed_tokens) == (288, 0)
    assert bench.computed == 600 - 288


def test_cancelled_while_it_waits():
    bench = Prompts(batch_tokens=64)
    bench.submit(prompt(300), 2)
    second, third = bench.submit(prompt(300), 2), bench.submit(prompt(300), 2)
    bench.step()
    bench.conductor.cancel(second)
    bench.run()
    assert bench.outcomes[second].finishes == [FinishReason.CANCELLED]
    assert bench.outcomes[third].tokens == prompt(2)
    assert bench.computed == 312
    bench.assert_idle()


def test_what_will_be_cached_costs_a_tenant_nothing():
    bench = Prompts(rows=3)
    for _ in range(2):
        bench.submit(prompt(200), 8, tenant="a")
    bench.submit(prompt(300, 1), 8, tenant="b")
    late = [bench.submit(prompt(20, 2), 8, tenant=tenant) for tenant in "ab"]
    for _ in range(12):
        bench.step()
    assert bench.first_steps[late[0]] <= bench.first_steps[late[1]]  # a: 208 tokens, not 400; b: 300


@dataclass(frozen=True)
class Asked:
    arrives: int
    system: int
    shared: int
    own: int
    max_tokens: int
    priority: int
    leaves: int | None


ASKED = st.builds(
    Asked,
    arrives=st.integers(0, 6),
    system=st.integers(0, 1),
    shared=st.sampled_from([0, 64, 100, 160]),
    own=st.integers(1, 40),
    max_tokens=st.integers(1, 6),
    priority=st.sampled_from([0, 0, 1]),
    leaves=st.sampled_from([None, None, None, 1, 3]),
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(ASKED, min_size=1, max_size=12),
    pages=st.sampled_from([14, 20, 40, 200]),
    fit=st.sampled_from(["sum", "none"]),
    rows=st.integers(2, 8),
    batch_tokens=st.sampled_from([48, 512]),
    mixed=st.booleans(),
    steps_ahead=st.sampled_from([0, 1]),
)
def test_whatever_shares_what_a_step_is_always_run_and_everybody_ends_once(
    requests, pages, fit, rows, batch_tokens, mixed, steps_ahead
):
    bench = Prompts(
        pages=pages, rows=rows, batch_tokens=batch_tokens, mixed=mixed, steps_ahead=steps_ahead, admission_fit=fit
    )
    asked_of: dict[int, tuple[Asked, list[int]]] = {}
    for turn in range(400):
        for asked in requests:
            if asked.arrives == turn:
                ids = prompt(asked.shared, asked.system) + prompt(asked.own, asked.own)
                rid = bench.submit(ids, asked.max_tokens, request_priority=asked.priority)
                asked_of[rid] = asked, ids
        for rid, (asked, _) in asked_of.items():
            if asked.leaves is not None and turn == asked.arrives + asked.leaves:
                bench.conductor.cancel(rid)
        if turn > 6 and not bench.conductor.has_work():
            break
        is_idle = not bench.conductor.num_running and not bench.conductor.num_queued
        refused = bench.conductor.counters.refused_admissions
        in_flight = len(bench.conductor._flights)
        report = bench.step()
        has_run = report.num_stepped or in_flight or bench.conductor.counters.refused_admissions > refused
        assert has_run or is_idle or not bench.conductor.num_running, "rows wait, and no step is run"
    for rid, (asked, ids) in asked_of.items():
        outcome = bench.outcomes[rid]
        assert outcome.num_ends == 1
        whole = [ids[number % len(ids)] for number in range(asked.max_tokens)]
        assert outcome.tokens == whole[: len(outcome.tokens)]
        assert outcome.tokens == whole or asked.leaves is not None
    bench.step()
    if not steps_ahead and not any(asked.leaves for asked, _ in asked_of.values()):
        counters = bench.conductor.counters  # a recomputed prompt's end is a token that would have been fed back
        expected = counters.prompt_tokens - counters.cached_prompt_tokens + counters.recomputed_tokens
        assert bench.computed == expected - bench.num_resumed
    assert not bench.conductor._table.follows.count
    assert not len(bench.conductor._followers)
    bench.assert_idle()
