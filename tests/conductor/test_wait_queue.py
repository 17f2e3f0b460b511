"""In which order those that wait join: priority and ageing, shares of the tenants, arrival."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mstar.conductor.fair_share import UNIT
from mstar.conductor.queue import Limits, Waiting
from mstar.conductor.request import MAX_PRIORITY, EngineRequest
from mstar.conductor.rows import RowTable
from mstar.conductor.wait_queue import WaitQueue
from mstar.engine.inputs import RequestInfo

ROWS = 4
SECOND = 1_000_000_000


class Rig:
    """A queue, its clock, and rows that generate when told to."""

    def __init__(self, ageing_s: float = 1.0, weight: float = 2.0) -> None:
        limits = Limits(
            max_running_requests=ROWS,
            max_queued_requests=10**6,
            max_batch_tokens=64,
            max_seq_len=10**6,
            vocab_size=64,
            priority_ageing_s=ageing_s,
            output_token_weight=weight,
        )
        self.now_ns = 0
        self.rows = RowTable(ROWS)
        self.queue = WaitQueue(limits, self.rows, lambda: self.now_ns)
        self.ids = itertools.count()

    def push(self, tenant: str = "", priority: int = 0, tokens: int = 1) -> int:
        rid = next(self.ids)
        request = EngineRequest(
            prompt_ids=bytes(4 * tokens), max_tokens=9, temperature=0.0, tenant=tenant, request_priority=priority
        )
        info = RequestInfo(request_id=rid, prompt_ids=np.zeros(tokens, np.int64), max_tokens=9, resource_configs={})
        self.queue.push(Waiting(rid, 0, rid, request, 9, info))
        return rid

    def join(self, row: int = 0, cached: int = 0) -> int:
        """Lets the head in, in the place of whoever has the row."""
        waiting = self.queue.head()
        assert waiting is not None
        self.leave(row)
        waiting.info.row, waiting.info.cached_tokens = row, cached
        self.queue.join(waiting)
        self.rows.join(waiting, 0)
        return waiting.request_id

    def leave(self, row: int) -> None:
        if self.rows.request_id[row] >= 0:
            self.rows.leave(row)

    def generate(self, *rows: int, tokens: int = 1) -> None:
        for _ in range(tokens):
            self.rows.landed(np.array(rows))

    def join_all(self) -> list[int]:
        return [self.join() for _ in range(len(self.queue))]


def test_without_priorities_and_tenants_it_is_first_come_first_served():
    rig = Rig()
    ids = [rig.push(tokens=tokens) for tokens in (5, 1, 9)]
    rig.now_ns = 50 * SECOND
    assert [*ids, rig.push()] == rig.join_all()


def test_a_higher_priority_goes_first():
    rig = Rig()
    low, high, middle, low_too = (rig.push(priority=priority) for priority in (-1, 7, 3, -1))
    assert rig.join_all() == [high, middle, low, low_too]


@pytest.mark.parametrize(("waited_s", "goes_first"), [(2.9, False), (3, True), (30, True)])
def test_an_older_one_has_caught_up_after_a_second_per_level(waited_s, goes_first):
    rig = Rig()
    old = rig.push(priority=2)
    rig.now_ns = int(waited_s * SECOND)
    new = rig.push(priority=5)
    assert rig.join_all() == ([old, new] if goes_first else [new, old])


def test_the_option_says_how_long_a_level_takes():
    rig = Rig(ageing_s=0.5)
    old = rig.push()
    rig.now_ns = SECOND
    new = rig.push(priority=2)
    assert rig.join_all() == [old, new]


def test_age_beyond_the_highest_priority_there_is_gives_no_tenant_an_advantage():
    rig = Rig()
    many = [rig.push("many", tokens=10) for _ in range(6)]
    rig.now_ns = 100 * SECOND
    few = [rig.push("few", tokens=10) for _ in range(2)]
    assert rig.join_all()[:4] == [many[0], few[0], many[1], few[1]]


def test_tenants_take_turns_by_the_tokens_of_their_prompts():
    rig = Rig()
    long = [rig.push("long", tokens=30) for _ in range(3)]
    short = [rig.push("short", tokens=10) for _ in range(6)]
    order = rig.join_all()
    assert order == [long[0], *short[:3], long[1], *short[3:], long[2]]


def test_cached_tokens_of_a_prompt_cost_nothing():
    rig = Rig()
    cached = [rig.push("cached", tokens=30) for _ in range(3)]
    rig.push("other", tokens=10)
    rig.push("other", tokens=10)
    assert rig.join(cached=25) == cached[0]
    rig.join()
    assert rig.join(cached=25) == cached[1]
    assert rig.join(cached=25) == cached[2]


@pytest.mark.parametrize(("weight", "first"), [(2.0, "few"), (0.5, "many")])
def test_generated_tokens_count_by_their_weight(weight, first):
    rig = Rig(weight=weight)
    for _ in range(2):
        rig.push("many", tokens=1)
        rig.push("few", tokens=10)
    rig.join(0)
    rig.join(1)
    rig.generate(0, tokens=8)  # with its prompt 17 or 5 tokens, against 10
    assert rig.queue.head().request.tenant == first


def test_what_a_row_generated_is_counted_also_once_it_has_changed_hands():
    rig = Rig()
    for tenant in ("a", "b"):
        for _ in range(3):
            rig.push(tenant, tokens=10)
    assert rig.join(0) == 0
    rig.generate(0, tokens=20)
    assert rig.join(0) == 3  # of b, which takes the row over: 10 + 40 tokens of a stay counted
    assert [rig.join(0) for _ in range(4)] == [4, 5, 1, 2]


def test_idleness_earns_nothing():
    rig = Rig()
    for _ in range(8):
        rig.push("busy", tokens=100)
    rig.push("idle", tokens=100)
    for _ in range(5):
        rig.join()
    late = [rig.push("late", tokens=100) for _ in range(4)]
    back = [rig.push("idle", tokens=100) for _ in range(4)]
    order = rig.join_all()
    assert max(order.index(rid) for rid in late) > 4  # no four in a row
    assert max(order.index(rid) for rid in back) > 4


def test_who_used_more_while_others_waited_waits_for_them():
    rig = Rig()
    rig.push("a", tokens=100)
    rig.push("b", tokens=10)
    rig.join(0)  # a, and nobody of it waits any more
    rig.generate(0, tokens=50)
    second_of_a = rig.push("a", tokens=10)
    ids = [rig.push("b", tokens=10) for _ in range(3)]
    assert rig.join_all() == [1, *ids, second_of_a]


def test_while_nobody_waits_nothing_is_held_against_anybody():
    rig = Rig()
    rig.push("a", tokens=1000)
    rig.push("b", tokens=10)
    rig.join_all()
    a, b = rig.push("a", tokens=10), rig.push("b", tokens=10)
    assert rig.join_all() == [a, b]


def test_the_head_keeps_its_place_while_it_waits_for_room():
    rig = Rig()
    for tenant in ("a", "b"):
        rig.push(tenant, tokens=10)
        waits = rig.push(tenant, tokens=10)
    rig.join(0)
    rig.join(1)
    head = rig.queue.head()
    assert head.request.tenant == "a"
    rig.generate(0, tokens=100)  # of a, so b has been served less
    assert rig.queue.head() is head
    assert [each.request_id for each in rig.queue.first(2)] == [head.request_id, waits]
    high = rig.push("a", priority=1, tokens=10)
    assert rig.queue.head().request_id == high
    rig.queue.remove(high)
    assert rig.queue.head().request_id == waits


def test_new_tenants_without_end_do_not_starve_one_that_was_served():
    rig = Rig()
    for _ in range(2):
        rig.push("victim", tokens=1000)
    rig.push("0", tokens=10)
    rig.join()
    joined = []
    for number in range(1, 1000):
        rig.push(str(number), tokens=10)
        joined.append(rig.join())
        if 1 in joined:
            break
    assert len(joined) <= 250  # 1,000 tokens, and two tenants at a time that wait


def test_new_requests_of_the_highest_priority_without_end_do_not_starve_one_of_the_lowest():
    rig = Rig()
    victim = rig.push(priority=-MAX_PRIORITY)
    for second in range(1000):
        rig.now_ns = second * SECOND
        rig.push(priority=MAX_PRIORITY)
        if rig.join() == victim:
            break
    assert second == 2 * MAX_PRIORITY


def test_cancelled_ones_leave_no_gap():
    rig = Rig()
    ids = [rig.push(tenant, priority, tokens=5) for tenant in "ab" for priority in (0, 3) for _ in range(2)]
    for rid in (ids[2], ids[0], ids[7]):
        assert rig.queue.remove(rid).request_id == rid
        assert rig.queue.remove(rid) is None
    assert rig.queue.num_tokens == 25
    assert sorted(rig.join_all()) == [ids[1], *ids[3:7]]
    assert rig.queue.head() is None
    assert (len(rig.queue), rig.queue.num_tokens, list(rig.queue.first(5))) == (0, 0, [])


def test_numbers_of_tenants_that_are_owed_nothing_are_used_again():
    rig = Rig()
    for number in range(500):
        rig.push(f"tenant {number}")
        rig.join(number % ROWS)
    assert rig.queue._shares._served.size <= 32


# Against a few lines that look through everybody.


@dataclass
class Asked:
    rid: int
    tenant: str
    priority: int
    tokens: int
    interval: int


@dataclass
class Model:
    """The policy, by its words."""

    waiting: list[Asked] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)
    level: int = 0
    rest: int = 0
    head: Asked | None = None

    def tenants(self) -> set[str]:
        return {asked.tenant for asked in self.waiting}

    def push(self, asked: Asked) -> None:
        if not self.waiting:
            self.level = max(self.level, *self.served.values(), 0)
        if asked.tenant not in self.tenants():
            self.served[asked.tenant] = max(self.served.get(asked.tenant, 0), self.level)
            self.level += 1
        self.waiting.append(asked)

    def charge(self, tenant: str, tokens: int) -> None:
        self.served[tenant] += tokens * UNIT
        if tenant in self.tenants():
            risen, self.rest = divmod(self.rest + tokens * UNIT, len(self.tenants()))
            self.level += risen

    def pick(self, interval: int) -> Asked:
        top = max(asked.priority for asked in self.waiting)
        due = [asked for asked in self.waiting if asked.priority + interval - asked.interval >= top]
        if self.head not in due:
            tenants = {asked.tenant for asked in due}
            least = min(tenants, key=self.served.__getitem__)
            assume(sum(self.served[tenant] == self.served[least] for tenant in tenants) == 1)
            self.head = next(asked for asked in due if asked.tenant == least)
        return self.head


OPERATION = st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abcd"), st.sampled_from([0, 0, 0, -2, 3]), st.integers(1, 20)),
    st.tuples(st.just("push"), st.sampled_from("abcd"), st.sampled_from([0, 0, 0, -2, 3]), st.integers(1, 20)),
    st.tuples(st.just("join"), st.integers(0, ROWS - 1)),
    st.tuples(st.just("remove"), st.integers(0, 30)),
    st.tuples(st.just("generate"), st.integers(0, ROWS - 1), st.integers(1, 20)),
    st.tuples(st.just("leave"), st.integers(0, ROWS - 1)),
    st.tuples(st.just("wait"), st.integers(1, 3)),
    st.tuples(st.just("look")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATION, max_size=60))
def test_any_traffic_goes_as_the_policys_words_say(operations):
    rig, model, owners = Rig(), Model(), {}
    last_joined: dict[tuple[str, int], int] = {}
    for kind, *values in operations:
        if kind == "push":
            tenant, priority, tokens = values
            rid = rig.push(tenant, priority, tokens)
            model.push(Asked(rid, tenant, priority, tokens, rig.now_ns // SECOND))
        elif kind == "join" and model.waiting:
            picked = model.pick(rig.now_ns // SECOND)
            assert rig.join(values[0]) == picked.rid
            model.charge(picked.tenant, picked.tokens)
            model.waiting.remove(picked)
            owners[values[0]] = picked.tenant
            line = picked.tenant, picked.priority
            assert picked.rid > last_joined.get(line, -1), "not first come first served within tenant and priority"
            last_joined[line] = picked.rid
        elif kind == "remove" and model.waiting:
            gone = model.waiting.pop(values[0] % len(model.waiting))
            rig.queue.remove(gone.rid)
        elif kind == "generate" and rig.rows.request_id[values[0]] >= 0:
            rig.generate(values[0], tokens=values[1])
            model.charge(owners[values[0]], 2 * values[1])
        elif kind == "leave":
            rig.leave(values[0])
        elif kind == "wait":
            rig.now_ns += values[0] * SECOND
        elif kind == "look" and model.waiting:
            check_first(rig, model)
        assert len(rig.queue) == len(model.waiting)
        assert rig.queue.num_tokens == sum(asked.tokens for asked in model.waiting)


def check_first(rig: Rig, model: Model) -> None:
    """All in the order in which they would join, and the first few of them, which fewer tenants are looked at for."""
    interval = rig.now_ns // SECOND
    every = [waiting.request_id for waiting in rig.queue.first(1000)]
    assert sorted(every) == sorted(asked.rid for asked in model.waiting)
    head = model.pick(interval)
    served, waiting = dict(model.served), list(model.waiting)
    served[head.tenant] += head.tokens * UNIT
    top = max(asked.priority for asked in waiting)
    expected = [head.rid]
    waiting.remove(head)
    while waiting:
        best = min(waiting, key=lambda asked: (
            -min(asked.priority + interval - asked.interval, top), served[asked.tenant], asked.rid
        ))  # fmt: skip
        waiting.remove(best)
        served[best.tenant] += best.tokens * UNIT
        expected.append(best.rid)
    assert every == expected
    for count in range(1, 6):
        assert [waiting.request_id for waiting in rig.queue.first(count)] == expected[:count]
