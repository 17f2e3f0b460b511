"""Priorities, tenants and deadlines through the whole conductor: who joins when, and that everybody ends once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.request import MAX_PRIORITY, FinishReason
from mstar.utils.errors import InvalidArgument, Unavailable

from .toy import Bench

SECOND = 1_000_000_000


class Watched(Bench):
    """A bench that notes who joins, in order."""

    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        self.joined: list[int] = []
        ingest = self.engine.ingest

        def noted(info):
            ingest(info)
            self.joined.append(info.request_id)

        self.engine.ingest = noted


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 2**40])
def test_a_priority_out_of_range_is_refused_by_name(priority):
    bench = Bench()
    with pytest.raises(InvalidArgument, match=rf"^request_priority: an integer >= -100 and <= 100, got {priority}"):
        bench.submit([5], request_priority=priority)
    assert not bench.conductor.has_work()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_flood_of_one_tenant_holds_up_another_for_one_request(steps_ahead):
    bench = Watched(rows=1, steps_ahead=steps_ahead)
    flood = [bench.submit([5, 6], 4, tenant="flood") for _ in range(20)]
    bench.now_ns += 30 * SECOND
    for _ in range(3):
        bench.step()
    few = [bench.submit([7, 8], 4, tenant="few") for _ in range(3)]
    bench.run()
    assert bench.joined[:7] == [flood[0], few[0], flood[1], few[1], flood[2], few[2], flood[3]]
    bench.assert_idle()


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("wish", "place"), [({"request_priority": 1}, 1), ({"tenant": "few"}, 2)])  # behind a head
def test_prompts_that_fill_the_next_steps_wait_in_the_queue_though_rows_are_free(wish, place, chunked, steps_ahead):
    bench = Watched(rows=16, context=512, batch_tokens=32, mixed=True, chunked=chunked, steps_ahead=steps_ahead)
    flood = [bench.submit([10 + number] * 300, 2) for number in range(6)]
    other = bench.submit([50] * 20, 2, **wish)
    bench.run()
    assert 1 <= bench.joined.index(other) <= place
    assert [each for each in bench.joined if each != other] == flood
    bench.assert_idle()


def test_short_prompts_join_while_rows_are_free():
    bench = Watched(rows=16, batch_tokens=8, mixed=True, chunked=True)
    ids = [bench.submit([10, 11, 12], 2) for _ in range(8)]
    assert bench.joined == ids[:6]  # 15 tokens leave room in two steps of 8, 18 do not
    bench.step()
    assert bench.joined == ids[:6]
    bench.step()  # the step before brought 8 tokens
    assert bench.joined == ids
    bench.run()
    bench.assert_idle()


def test_who_waits_for_others_prompts_alone_fills_no_queue():
    bench = Watched(rows=4, context=512, batch_tokens=32, mixed=True, chunked=True, queued=1)
    for _ in range(5):  # as many as there are rows, and one
        bench.submit([10] * 300, 2)
    assert len(bench.joined) == 1
    with pytest.raises(Unavailable, match="max_queued_requests"):
        bench.submit([10] * 300, 2)
    bench.run()
    bench.assert_idle()


def test_a_higher_priority_joins_first_and_age_catches_up():
    bench = Watched(rows=1)
    running = bench.submit([5], 8)
    low = bench.submit([5], 2)
    bench.now_ns += 4 * SECOND
    high = [bench.submit([5], 2, request_priority=priority) for priority in (4, 5)]
    bench.run()
    assert bench.joined == [running, high[1], low, high[0]]


@dataclass(frozen=True)
class Asked:
    arrives: int
    tenant: str
    priority: int
    prompt: int
    max_tokens: int
    time_limit: int | None
    leaves: int | None


ASKED = st.builds(
    Asked,
    arrives=st.integers(0, 12),
    tenant=st.sampled_from(["", "a", "b"]),
    priority=st.sampled_from([0, 0, 0, 4, -3]),
    prompt=st.integers(1, 20),
    max_tokens=st.integers(1, 12),
    time_limit=st.sampled_from([None, None, None, 1, 6]),
    leaves=st.sampled_from([None, None, None, 1, 5]),
)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(ASKED, min_size=1, max_size=14),
    rows=st.integers(1, 3),
    order=st.sampled_from(["fifo", "fifo", "backfill"]),
    steps_ahead=st.sampled_from([0, 1]),
)
def test_whatever_comes_the_order_holds_and_everybody_ends_once(requests, rows, order, steps_ahead):
    bench = Watched(
        pages=10, page_size=4, context=48, rows=rows, queued=8, steps_ahead=steps_ahead, admission_order=order
    )
    asked_of: dict[int, Asked] = {}
    came: dict[int, int] = {}  # the second
    for second in range(600):
        for asked in requests:
            if asked.arrives == second:
                deadline = 0 if asked.time_limit is None else bench.now_ns + asked.time_limit * SECOND
                try:
                    rid = bench.submit(
                        range(3, 3 + asked.prompt),
                        asked.max_tokens,
                        tenant=asked.tenant,
                        request_priority=asked.priority,
                        deadline_ns=deadline,
                    )
                except Unavailable:  # a full queue
                    continue
                asked_of[rid], came[rid] = asked, bench.now_ns // SECOND
        for rid, asked in asked_of.items():
            if asked.leaves is not None and second >= asked.arrives + asked.leaves:
                bench.conductor.cancel(rid)
        if second > 12 and not bench.conductor.has_work():
            break
        before, head = len(bench.joined), bench.conductor._lobby.queue._head
        in_time = [each for each in bench.conductor._lobby if not 0 < each.request.deadline_ns <= bench.now_ns]
        waiting = {each.request_id for each in in_time}
        now = bench.now_ns // SECOND
        bench.step()
        if order == "fifo":
            keeps_place = None if head is None else head.waiting.request_id
            check_order(bench.joined[before:], keeps_place, waiting, asked_of, came, now)
        bench.now_ns += SECOND
    bench.assert_idle()
    for rid, asked in asked_of.items():
        outcome = bench.outcomes[rid]
        assert outcome.num_ends == 1
        whole = [3 + number % asked.prompt for number in range(asked.max_tokens)]
        assert outcome.tokens == whole[: len(outcome.tokens)]
        if outcome.finishes == [FinishReason.LENGTH]:
            assert outcome.tokens == whole


def check_order(
    joined: list[int], head: int | None, waiting: set[int], asked_of: dict[int, Asked], came: dict[int, int], now: int
) -> None:
    """Of those that waited before a step, nobody was passed by a lower level, nor by a later one of its tenant that was
    not the head before."""
    for rid in joined:
        top = max(asked_of[each].priority for each in waiting)
        level = {each: min(asked_of[each].priority + now - came[each], top) for each in waiting}
        assert level[rid] == top
        waiting.remove(rid)
        if rid == head:
            continue
        own = asked_of[rid]
        assert not any(each < rid and level[each] == top and asked_of[each].tenant == own.tenant for each in waiting), (
            "an earlier one of its tenant was due"
        )


def test_who_got_a_row_while_nobody_waited_is_served_for_what_it_makes_once_somebody_does():
    bench = Bench(rows=2, pages=200, context=128, batch_tokens=256, prefix_cache=False)
    for number in range(8):
        bench.submit([10 + number] * 100, 1, tenant="a")
    bench.run()  # "a" was served much, which is forgotten
    for number, tenant in enumerate("ab"):
        bench.submit([20 + number] * 4, 90, tenant=tenant)
    ids = [bench.submit([22] * 4, 1, tenant="c")]
    for _ in range(50):
        bench.step()
    ids += [bench.submit([23 + number] * 4, 1, tenant=tenant) for number, tenant in enumerate("ab")]
    joined, join = [], bench.conductor._table.join

    def noted(waiting, state):
        joined.append(waiting.request_id)
        join(waiting, state)

    bench.conductor._table.join = noted
    bench.run()
    assert joined == ids  # both have been served alike since somebody waits, so they take turns as they came
