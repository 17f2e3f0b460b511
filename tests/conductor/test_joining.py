"""Who joins next: the head of the queue, or who may pass a head that waits for pages."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.conductor.configs import RequestConfigs
from mstar.conductor.joining import Joining
from mstar.conductor.pools import Pools
from mstar.conductor.queue import Limits, Waiting
from mstar.conductor.request import EngineRequest
from mstar.conductor.rows import RowTable
from mstar.conductor.wait_queue import WaitQueue
from mstar.engine.resources.kv.config import PagedKVConfig, PagedKVSpec

from .toy import Bench

KV = PagedKVConfig(num_layers=1, num_kv_heads=1, head_dim=1, max_seq_len=64, page_size=16)


class Pool:
    """Free pages of 16 tokens; requests of at most ``small`` tokens may pass."""

    config = KV
    num_usable_pages = 100
    prefixes = None

    def __init__(self, free: int, order: str = "fifo", window: int = 128, small: int = 0) -> None:
        self.free_pages = free
        self.admission_order = order
        self.admission_fit = "sum"
        self.promised_pages = 0
        self.backfill_window = window
        self.small = small
        self.asked: list[int] = []

    @property
    def admission_version(self):
        return self.free_pages

    def pages_for(self, tokens):
        return -(-tokens // 16)

    def can_ever_fit(self, tokens):
        return True

    def can_join(self, config):
        self.asked.append(config.prompt_tokens)
        return self.pages_for(config.prompt_tokens + config.max_tokens) <= self.free_pages

    def may_pass(self, config, head):
        assert head.prompt_tokens > self.free_pages * 16 - 16
        return config.prompt_tokens <= self.small


class Queue:
    """A queue, its pool, and who joined."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        limits = Limits(
            max_running_requests=8, max_queued_requests=99, max_batch_tokens=64, max_seq_len=64, vocab_size=64
        )
        self.queue = WaitQueue(limits, RowTable(8))
        self.joining = Joining(self.queue, Pools({"kv": pool}))
        self.configs = RequestConfigs([PagedKVSpec("kv", {"LLM"}, KV)], 64, ())

    def push(self, *prompts: int) -> None:
        for tokens in prompts:
            number = self.queue.num_pushed
            request = EngineRequest(prompt_ids=np.zeros(tokens, "<i4").tobytes(), max_tokens=1, temperature=0.0)
            self.queue.push(Waiting(number, 0, number, request, 1, self.configs.describe(number, request, 1)))

    def join(self) -> list[int]:
        """Lets in whoever can; they take no pages."""
        joined = []
        while (waiting := self.joining.next()) is not None:
            self.queue.remove(waiting.request_id)
            joined.append(waiting.request_id)
        return joined


def test_nobody_passes_the_head_in_fifo_order():
    waiting = Queue(Pool(free=2, small=64))
    waiting.push(10, 40, 5)
    assert waiting.join() == [0]
    waiting.pool.free_pages = 3
    assert waiting.join() == [1, 2]


def test_with_backfill_those_pass_that_cost_the_head_nothing():
    waiting = Queue(Pool(free=2, order="backfill", small=8))
    waiting.push(60, 20, 5, 6)
    assert waiting.join() == [2, 3]
    waiting.pool.free_pages = 4
    assert waiting.join() == [0, 1]


@pytest.mark.parametrize(("window", "joined"), [(1, []), (2, []), (3, [2, 3]), (128, [2, 3])])
def test_only_the_first_of_the_window_are_looked_at(window, joined):
    waiting = Queue(Pool(free=2, order="backfill", window=window, small=8))
    waiting.push(60, 20, 5, 6)
    assert waiting.join() == joined


@pytest.mark.parametrize("order", ["fifo", "backfill"])
def test_a_refusal_is_remembered_until_pages_or_head_change(order):
    waiting = Queue(Pool(free=1, order=order, small=8))
    waiting.push(60, 50)
    assert waiting.join() == []
    asked = len(waiting.pool.asked)
    for _ in range(5):
        assert waiting.join() == []
    assert len(waiting.pool.asked) == asked
    waiting.push(55)
    waiting.join()
    assert waiting.pool.asked[asked:] == ([55] if order == "backfill" else [])  # the newcomer alone
    asked = len(waiting.pool.asked)
    waiting.pool.free_pages = 2
    waiting.join()
    assert waiting.pool.asked[asked] == 60
    asked = len(waiting.pool.asked)
    waiting.queue.remove(0)
    waiting.join()
    assert waiting.pool.asked[asked] == 50


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        ({"tenant": "a", "cache_salt": "x"}, {"tenant": "a", "cache_salt": "x"}, 8),
        ({"tenant": "a"}, {"tenant": "b"}, 0),
        ({"tenant": "a"}, {}, 0),
        ({"cache_salt": "x"}, {"cache_salt": "y"}, 0),
        pytest.param({"no_cache": True}, {}, 0, id="fills nothing"),
        pytest.param({}, {"no_cache": True}, 0, id="reads nothing"),
        ({"request_priority": 5}, {"request_priority": -5}, 8),
    ],
)
def test_prefixes_are_shared_by_requests_that_may(first, second, cached):
    bench = Bench(page_size=4)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    bench.submit(prompt, 3, **first)
    bench.run()
    bench.submit(prompt, 3, **second)
    assert bench.step().cached_prompt_tokens == cached
    bench.run()
    bench.assert_idle()


def test_prompts_that_begin_alike_share_pages_and_are_counted():
    bench = Bench(page_size=4)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    first = bench.submit(prompt, 3)
    bench.run()
    second = bench.submit([*prompt[:8], 20], 3)
    report = bench.step()
    assert report.cached_prompt_tokens == 8
    assert bench.echo.spans[-1] == (1,)
    bench.run()
    assert (bench.outcomes[first].tokens, bench.outcomes[second].tokens) == ([5, 6, 7], [5, 6, 7])
    counters = bench.conductor.counters
    assert (counters.prompt_tokens, counters.cached_prompt_tokens) == (18, 8)
    bench.assert_idle()
