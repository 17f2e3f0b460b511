"""The admission gate: who may join, by what fits, and who may pass the head of the queue."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.kv.admission import NEVER, AdmissionGate, Demand, is_safe
from mstar.engine.resources.kv.config import PagedKVConfig
from mstar.engine.resources.kv.pages import PageArena

SIZE = 4


class Pool:
    """A gate over a pool of ``pages``, and requests that run as an engine runs them: a token each per step."""

    def __init__(self, pages=20, fit="sum", order="fifo", rows=12):
        config = PagedKVConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            max_seq_len=1000,
            max_num_pages=pages + 1,
            page_size=SIZE,
            admission_fit=fit,
            admission_order=order,
        )
        self.arena = PageArena(pages + 1)
        self.stored = np.zeros(rows, np.int64)
        self.held = np.zeros(rows, np.int64)
        self.pages = {}
        self.demands = {}
        self.gate = AdmissionGate(config, self.arena, rows, lambda: (self.stored, self.held))

    def join(self, prompt, target, **fields):
        row = min(set(range(self.stored.size)) - set(self.demands))
        self.demands[row] = Demand(prompt, target, **fields)
        self.gate.reserve(row, self.demands[row])
        self.pages[row] = []
        return row

    def run(self, row, tokens=None):
        """Stores the prompt, or one token more, or ``tokens``; False if the pool is too small for it."""
        stored = self.stored[row]
        end = max(stored + 1, self.demands[row].prompt) if tokens is None else tokens
        got = self.arena.try_allocate(-(-end // SIZE) - self.held[row])
        if got is None:
            return False
        self.pages[row] += got.tolist()
        self.held[row] = len(self.pages[row])
        self.stored[row] = end
        return True

    def leave(self, row):
        self.arena.release(np.array(self.pages.pop(row), np.int32))
        self.held[row] = self.stored[row] = 0
        del self.demands[row]
        self.gate.forget(np.array([row]))

    def step(self):
        """All requests, in step; those that hold their target leave."""
        for row in list(self.demands):
            assert self.run(row), "a running request finds no page"
        for row in [row for row, demand in self.demands.items() if self.stored[row] >= demand.target]:
            self.leave(row)


def can_join(pool, prompt, target, **fields):
    return pool.gate.can_join(Demand(prompt, target, **fields))


class TestSum:
    @pytest.mark.parametrize(
        ("need", "fits"),
        [
            ({"prompt": 4, "target": 40}, True),
            ({"prompt": 4, "target": 41}, False),
            ({"prompt": 4, "target": 44, "lent": 1}, True),
            ({"prompt": 4, "target": 20, "labels": 2}, True),
            ({"prompt": 4, "target": 21, "labels": 2}, False),
            ({"prompt": 80, "target": 0}, True),  # reserves nothing
        ],
    )
    def test_all_promises_fit_at_one_time(self, need, fits):
        pool = Pool()
        pool.run(pool.join(4, 40))  # 10 of 20 pages, 1 of them held
        assert pool.gate.promised == 9
        assert pool.gate.can_join(Demand(**need)) is fits

    def test_taking_a_promised_page_changes_neither_answers_nor_the_version(self):
        pool = Pool()
        row = pool.join(4, 40)
        version = pool.gate.version
        for tokens in range(4, 41):
            pool.run(row, tokens)
            assert can_join(pool, 1, 40)
            assert not can_join(pool, 1, 41)
            assert pool.gate.version == version

    def test_a_departure_moves_the_version(self):
        pool = Pool()
        row = pool.join(4, 40)
        pool.run(row)
        version = pool.gate.version
        pool.leave(row)
        assert pool.gate.version != version

    def test_pages_only_the_index_holds_are_room_and_lent_ones_are_not_counted_twice(self):
        pool = Pool()
        cached = pool.arena.try_allocate(5)
        assert not can_join(pool, 1, 61)
        pool.arena.seal(cached)
        assert can_join(pool, 1, 80)
        pool.arena.share(cached)  # somebody uses them
        assert can_join(pool, 21, 80, lent=5)
        assert not can_join(pool, 21, 80, lent=4)

    def test_more_pages_than_were_promised_are_nobodys_loss(self):
        """A fork, or retention, may leave a stream with more than its own share."""
        pool = Pool()
        pool.run(pool.join(4, 8), tokens=16)
        assert pool.gate.promised == 0
        assert can_join(pool, 1, 64)
        assert not can_join(pool, 1, 65)


class TestPeak:
    def test_requests_that_end_at_different_times_may_share_pages(self):
        """The first grows from 9 to 10 pages and leaves after 4 steps; until then the second holds at most 2."""
        pool = Pool(pages=12, fit="peak")
        pool.run(pool.join(36, 40))
        assert can_join(pool, 4, 48)
        assert pool.gate.promised + 12 > pool.arena.num_available  # all promises would not fit at one time
        assert not can_join(pool, 9, 48)  # 3 pages at once: 13 at the peak

    @pytest.mark.parametrize(("target", "fits"), [(40, True), (44, True), (48, True), (49, False)])
    def test_one_alone_may_have_the_pool(self, target, fits):
        assert can_join(Pool(pages=12, fit="peak"), 4, target) is fits

    def test_an_order_to_end_in_is_wanted_too(self):
        """Both peak together within the pool, but only if neither is ever held up: no order could end them."""
        held, short = np.array([3, 3]), np.array([3, 3])
        assert not is_safe(held, short, free=2)
        assert is_safe(held, short, free=3)

    def test_every_page_that_comes_or_goes_moves_the_version(self):
        pool = Pool(fit="peak")
        row = pool.join(4, 40)
        versions = []
        for tokens in (4, 8, 12):
            pool.run(row, tokens)
            versions.append(pool.gate.version)
        assert len(set(versions)) == 3

    def test_whatever_sum_lets_in_peak_does(self):
        pool = Pool(fit="peak")
        shared = pool.arena.try_allocate(10)
        pool.arena.seal(shared)
        for _ in range(2):  # 10 pages in common, 1 more each: as footprints they would count 22
            row = pool.join(40, 44)
            pool.arena.share(shared)
            pool.pages[row] = shared.tolist()
            pool.held[row] = 10
            pool.stored[row] = 40
        assert can_join(pool, 1, 32)
        assert not can_join(pool, 1, 36)


class TestNone:
    def test_the_prompts_fit_whatever_they_grow_to(self):
        pool = Pool(fit="none")
        pool.join(40, 1000)
        assert can_join(pool, 40, 1000)
        assert not can_join(pool, 41, 1000)

    def test_growth_is_not_foreseen(self):
        pool = Pool(fit="none")
        row = pool.join(4, 1000)
        for tokens in (4, 40, 72):
            pool.run(row, tokens)
            assert can_join(pool, 80 - tokens, 1000)
            assert not can_join(pool, 81 - tokens, 1000)


@pytest.mark.parametrize(
    ("held", "short", "free", "safe"),
    [
        ([], [], 0, True),
        ([5], [0], 0, True),
        ([5], [1], 0, False),
        ([1, 4], [2, 3], 2, True),  # the first ends with the 2 free and gives 3 back
        ([1, 4], [3, 3], 2, False),
        ([9, 1, 1], [9, 1, 2], 1, False),
        ([1, 1, 7], [3, 1, 2], 1, True),
    ],
)
def test_the_safety_order(held, short, free, safe):
    assert is_safe(np.array(held, np.int64), np.array(short, np.int64), free) is safe


class TestBackfill:
    @pytest.fixture
    def pool(self):
        """20 pages, of which one request is promised 10 for 8 more steps; the head, who wants 15, starts after them."""
        pool = Pool(order="backfill")
        pool.run(pool.join(32, 40))
        return pool

    HEAD = Demand(4, 60)

    @pytest.mark.parametrize(
        ("candidate", "passes"),
        [
            (Demand(4, 11), True),  # ends in time
            (Demand(4, 20), True),  # does not, but the head fits beside its 5 pages
            (Demand(4, 21), False),  # 6 pages: the head would wait for it
            (Demand(33, 40), True),  # as many as are left, but gone in time
            (Demand(32, 40), False),  # one step later it is not
            (Demand(33, 41), False),  # does not fit now
        ],
    )
    def test_who_ends_before_the_head_starts_or_fits_beside_it_may_pass(self, pool, candidate, passes):
        assert not pool.gate.can_join(self.HEAD)
        assert pool.gate.may_pass(candidate, self.HEAD) is passes

    def test_in_order_of_arrival_nobody_passes(self):
        pool = Pool(order="fifo")
        pool.run(pool.join(32, 40))
        assert not pool.gate.may_pass(Demand(1, 2), self.HEAD)
        assert pool.gate.backfill_window == 0

    def test_each_who_passed_counts_against_the_next(self, pool):
        late = Demand(4, 20)  # 5 pages, beside the head's 15
        assert pool.gate.may_pass(late, self.HEAD)
        pool.run(pool.join(late.prompt, late.target))
        assert not pool.gate.may_pass(replace(late, target=16), self.HEAD)

    def test_a_head_that_can_never_start_holds_nobody_up(self, pool):
        assert pool.gate.start_of(self.HEAD) == 8
        assert pool.gate.start_of(Demand(4, 100)) == NEVER
        assert pool.gate.may_pass(Demand(4, 40), Demand(4, 100))


# Properties: random requests through the gate, run to the end.

requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 40)).map(lambda r: Demand(r[0], min(r[0] + r[1], 48))), max_size=25
)


def admit(pool, queue):
    """Joins as a conductor does; the demands that joined, and the ones that passed the head."""
    while queue and len(pool.demands) < pool.stored.size and pool.gate.can_join(queue[0]):
        head = queue.pop(0)
        pool.join(head.prompt, head.target)
    for need in queue[1 : 1 + pool.gate.backfill_window]:
        if len(pool.demands) < pool.stored.size and pool.gate.may_pass(need, queue[0]):
            queue.remove(need)
            pool.join(need.prompt, need.target)


@settings(max_examples=80, deadline=None)
@given(requests, st.sampled_from(["fifo", "backfill"]), st.randoms(use_true_random=True))
def test_sum_never_over_commits_whatever_the_pace(queue, order, random):
    """Requests advance at random, many tokens at a time, and may end early: a page is always there."""
    pool = Pool(pages=12, order=order)
    while queue or pool.demands:
        admit(pool, queue)
        assert pool.demands, "the queue is stuck before an empty pool"
        for row, demand in list(pool.demands.items()):
            if random.random() < 0.5:
                assert pool.run(row, random.randint(int(pool.stored[row]), demand.target))
            if pool.stored[row] >= demand.target or random.random() < 0.1:
                pool.leave(row)


@settings(max_examples=120, deadline=None)
@given(requests, st.sampled_from(["sum", "peak"]), st.sampled_from(["fifo", "backfill"]))
def test_in_step_everybody_finds_pages_and_ends(queue, fit, order):
    pool = Pool(pages=12, fit=fit, order=order)
    while queue or pool.demands:
        admit(pool, queue)
        assert pool.demands, "the queue is stuck before an empty pool"
        pool.step()


@settings(max_examples=120, deadline=None)
@given(requests, st.sampled_from(["fifo", "backfill"]), st.randoms(use_true_random=True))
def test_peak_never_deadlocks_at_uneven_pace(queue, order, random):
    """Whoever would leave no order to end in waits; somebody can always go on."""
    pool = Pool(pages=12, fit="peak", order=order)
    while queue or pool.demands:
        admit(pool, queue)
        rows = sorted(pool.demands)
        random.shuffle(rows)
        moved = 0
        for row in rows:
            if moved and random.random() < 0.4:
                continue  # held up by something else
            held = np.array([pool.held[r] for r in rows])
            short = np.array([-(-pool.demands[r].target // SIZE) for r in rows]) - held
            i, end = rows.index(row), max(pool.stored[row] + 1, pool.demands[row].prompt)
            more = -(-end // SIZE) - held[i]
            change = np.where(np.arange(len(rows)) == i, more, 0)
            if is_safe(held + change, short - change, pool.arena.num_free - more) and pool.arena.num_free >= more:
                assert pool.run(row)
                moved += 1
        assert moved, "nobody can go on"
        for row in [r for r in rows if pool.stored[r] >= pool.demands[r].target]:
            pool.leave(row)


@settings(max_examples=80, deadline=None)
@given(requests, st.sampled_from(["sum", "peak"]), requests, st.integers(1, 40))
def test_nobody_who_passes_delays_the_head(running, fit, queue, prompt):
    """The head starts by the time it would have started had nobody passed it."""
    starts = []
    for order in ("fifo", "backfill"):
        pool = Pool(pages=12, fit=fit, order=order, rows=60)
        waiting = list(running)
        while waiting and pool.gate.can_join(waiting[0]):
            need = waiting.pop(0)
            pool.join(need.prompt, need.target)
        head, behind = Demand(prompt, 47), list(queue)
        for step in range(200):
            if pool.gate.can_join(head):
                starts.append(step)
                break
            if order == "backfill":
                for need in list(behind):
                    if pool.gate.may_pass(need, head):
                        behind.remove(need)
                        pool.join(need.prompt, need.target)
            pool.step()
    assert starts[1] <= starts[0]


@pytest.mark.parametrize("fit", ["sum", "peak", "none"])
def test_a_request_that_fits_the_pool_always_joins_an_empty_one(fit):
    pool = Pool(pages=12, fit=fit)
    assert can_join(pool, 1, 48)
    assert can_join(pool, 48, 48)
