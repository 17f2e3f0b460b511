"""Of those that wait, who shares with the prefix cache may go first: within a tenant, so often and no oftener."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.conductor.passes import Passes

from .toy import Bench

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Join:
    """``head``: whose turn it was, if anybody's; ``waiting``: the others, in order of arrival."""

    rid: int
    head: int | None
    waiting: tuple[int, ...]
    second: int


class Watched(Bench):
    """A bench that notes who joins, in order, and who else waited."""

    def __init__(self, **fields) -> None:
        super().__init__(**{"page_size": 4, "context": 96, "rows": 1} | fields)
        self.joins: list[Join] = []
        ingest, queue = self.engine.ingest, self.conductor._lobby.queue

        def noted(info):
            head = None if queue._head is None else queue._head.waiting.request_id
            others = tuple(each.request_id for each in queue if each.request_id != info.request_id)
            ingest(info)
            self.joins.append(Join(info.request_id, head, others, self.now_ns // SECOND))

        self.engine.ingest = noted

    @property
    def joined(self) -> list[int]:
        return [join.rid for join in self.joins]

    def ask(self, kind: int, own: int = 1, max_tokens: int = 3, **fields) -> int:
        """Sixteen tokens of some kind, and as many as one page of its own."""
        return self.submit([10 + kind] * 16 + [60 + own % 25] * 4, max_tokens, **fields)


def test_who_finds_half_of_its_prompt_cached_goes_first():
    bench = Watched(prefix_passes=8)
    first = bench.ask(0)
    other = bench.ask(1)
    same = bench.ask(0, 2)
    bench.run()
    assert bench.joined == [first, same, other]
    assert bench.conductor.counters.cached_prompt_tokens == 16


def test_without_passes_it_is_first_come_first_served():
    bench = Watched(prefix_passes=0)
    ids = [bench.ask(number % 2) for number in range(6)]
    bench.run()
    assert bench.joined == ids


@pytest.mark.parametrize("passes", [1, 3])
def test_nobody_is_passed_oftener_than_the_bound(passes):
    bench = Watched(prefix_passes=passes)
    first, other = bench.ask(0), bench.ask(1)
    same = [bench.ask(0, number) for number in range(6)]
    bench.run()
    assert bench.joined == [first, *same[:passes], other, *same[passes:]]


def test_less_than_half_is_no_reason():
    bench = Watched(prefix_passes=8)
    first = bench.ask(0)
    other = bench.ask(1)
    little = bench.submit([10] * 8 + [50] * 30, 3)
    bench.run()
    assert bench.joined == [first, other, little]


def test_what_was_evicted_is_no_reason_any_more():
    bench = Watched(prefix_passes=8, pages=12)
    first = bench.ask(0)
    bench.step()
    big = bench.submit([50] * 40, 3, request_priority=5)  # all pages but one
    other, same = bench.ask(1), bench.ask(0, 2)
    bench.run()
    assert bench.kv.prefixes.index.counters["evictions"] > 0
    assert bench.joined == [first, big, other, same]


def test_backfill_passes_nobody_oftener_than_its_window():
    bench = Watched(pages=10, rows=4, admission_order="backfill", backfill_window=2)
    long = bench.submit([10] * 4, 30)
    waits = bench.submit([20] * 20, 3)
    small = [bench.submit([30 + number], 2) for number in range(6)]
    bench.run()
    assert bench.joined == [long, *small[:2], waits, *small[2:]]


def test_a_turn_is_the_tenants():
    """Who goes first takes the turn of its own tenant's head, and costs what it computes: 4 and 6 for its output,
    against 26 of the other tenant's requests."""
    bench = Watched(prefix_passes=8)
    first, other = bench.ask(0, tenant="a"), bench.ask(1, tenant="a")
    same = [bench.ask(0, number, tenant="a") for number in range(8)]
    theirs = [bench.ask(2 + number, tenant="b") for number in range(5)]
    bench.run()
    assert bench.joined[0] == first
    assert [rid for rid in bench.joined if rid in same] == same
    turns = "".join("b" if rid in theirs else "a" for rid in bench.joined[: bench.joined.index(theirs[-1])])
    assert max(map(len, turns.split("b"))) == 3
    assert bench.joined.index(other) > bench.joined.index(theirs[1])


def test_a_lower_priority_is_no_earlier_for_it():
    bench = Watched(prefix_passes=8)
    first = bench.ask(0)
    high, low = bench.ask(1, request_priority=5), bench.ask(0, 2)
    bench.run()
    assert bench.joined == [first, high, low]


def test_who_does_not_read_the_cache_passes_nobody():
    bench = Watched(prefix_passes=8)
    ids = [bench.ask(0), bench.ask(1), bench.ask(0, 2, no_cache=True)]
    bench.run()
    assert bench.joined == ids


def test_those_that_leave_are_forgotten():
    bench = Watched(prefix_passes=8)
    ids = [bench.ask(number % 3, number) for number in range(20)]
    lines = bench.conductor._lobby.queue._prefixes
    for rid in ids[3:]:
        bench.conductor.cancel(rid)
    bench.run()
    assert bench.joined == ids[:3]
    assert not any((len(lines), lines._lines, lines._heaps, bench.kv.prefixes.index._watched))


@given(st.lists(st.integers(0, 30), unique=True, max_size=31), st.integers(0, 30))
def test_passes_are_those_of_higher_numbers(numbers, asked):
    passes = Passes()
    for number in numbers:
        passes.note(number, -1)
    assert passes.of(asked) == sum(number > asked for number in numbers)
    passes.note(31, asked)
    assert passes.of(asked) == sum(number > asked for number in numbers) + 1
    assert all(number > asked for number in passes._numbers)


@dataclass(frozen=True)
class Asked:
    arrives: int
    tenant: str
    priority: int
    kind: int
    own: int
    max_tokens: int
    leaves: int | None


ASKED = st.builds(
    Asked,
    arrives=st.integers(0, 12),
    tenant=st.sampled_from(["", "", "a"]),
    priority=st.sampled_from([0, 0, 0, 4, -3]),
    kind=st.integers(0, 2),
    own=st.integers(0, 9),
    max_tokens=st.integers(1, 9),
    leaves=st.sampled_from([None, None, None, 1, 5]),
)


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(ASKED, min_size=1, max_size=20),
    rows=st.integers(1, 3),
    pages=st.sampled_from([9, 14, 60]),
    order=st.sampled_from(["fifo", "backfill"]),
    window=st.sampled_from([2, 128]),
    passes=st.integers(0, 3),
)
def test_whatever_comes_nobody_is_passed_oftener_than_the_bound(requests, rows, pages, order, window, passes):
    bench = Watched(rows=rows, pages=pages, admission_order=order, backfill_window=window, prefix_passes=passes)
    asked_of: dict[int, Asked] = {}
    came: dict[int, int] = {}
    for second in range(800):
        for asked in requests:
            if asked.arrives == second:
                rid = bench.ask(
                    asked.kind, asked.own, asked.max_tokens, tenant=asked.tenant, request_priority=asked.priority
                )
                asked_of[rid], came[rid] = asked, bench.now_ns // SECOND
        for rid, asked in asked_of.items():
            if asked.leaves is not None and second >= asked.arrives + asked.leaves:
                bench.conductor.cancel(rid)
        if second > 12 and not bench.conductor.has_work():
            break
        bench.step()
        bench.now_ns += SECOND
    bench.assert_idle()
    assert all(bench.outcomes[rid].num_ends == 1 for rid in asked_of)
    most = max(passes, window if order == "backfill" else 0)
    assert max(times_passed(bench.joins, asked_of, came, order).values(), default=0) <= most


def times_passed(joins: list[Join], asked_of: dict[int, Asked], came: dict[int, int], order: str) -> Counter[int]:
    """How often each was passed by a later one of its tenant while it was due, other than by the head."""
    passed: Counter[int] = Counter()
    for join in joins:
        everybody = (join.rid, *join.waiting)
        top = max(asked_of[each].priority for each in everybody)
        level = {each: min(asked_of[each].priority + join.second - came[each], top) for each in everybody}
        if order == "fifo":
            assert level[join.rid] == top
        if join.rid != join.head:
            passed.update(
                each
                for each in join.waiting
                if each < join.rid and level[each] == top and asked_of[each].tenant == asked_of[join.rid].tenant
            )
    return passed
