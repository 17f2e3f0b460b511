"""Threads that handle what was put for requests, each request's in order."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import numpy as np
import pytest

from mstar.runtime.messages import TokenRows
from mstar.serving.rows import TicketRows
from mstar.serving.senders import Failure, Prompt, SenderPool
from mstar.serving.sequences import split_ticket, ticket_of
from mstar.utils.errors import ErrorCode


class Recorder:
    """Remembers what was handled for each request, and whether two threads ever had one at a time."""

    def __init__(self) -> None:
        self.seen: dict[int, list[object]] = defaultdict(list)
        self.overlapped = False
        self.prompt_gate = threading.Event()
        self.prompt_gate.set()
        self._busy: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def handle_tokens(self, rows: TicketRows) -> None:
        self._record(split_ticket(rows.ticket)[0], list(rows.tokens))

    def handle_prompt(self, prompt: Prompt) -> None:
        self._record(prompt.number, ["prompt"])

    def handle_failure(self, failure: Failure) -> None:
        self._record(failure.number, ["failure"])

    def _record(self, number: int, items: list[object]) -> None:
        lock = self._busy[number]
        if not lock.acquire(blocking=False):
            self.overlapped = True
            return
        if items == ["prompt"]:
            self.prompt_gate.wait(5)
        time.sleep(0.0002)
        self.seen[number] += items
        lock.release()


def tokens_for(numbers: list[int], token: int) -> TokenRows:
    tickets = np.array([ticket_of(number, 0) for number in numbers])
    return TokenRows(tickets, np.full(len(numbers), token, np.int32), np.zeros(len(numbers), np.uint8))


@pytest.mark.parametrize("size", [1, 4])
def test_each_requests_items_are_handled_once_in_order_by_one_thread_at_a_time(size):
    recorder, rng = Recorder(), np.random.default_rng(size)
    pool = SenderPool(recorder, size)
    expected: dict[int, list[object]] = defaultdict(list)
    for step in range(200):
        newest = 1 + step // 10
        numbers = sorted({newest, *rng.integers(1, newest + 1, 8).tolist()})
        if step % 10 == 0:
            pool.put(Prompt(newest, np.empty(0)))
            expected[newest].append("prompt")
        pool.put_tokens(tokens_for(numbers, step))
        for number in numbers:
            expected[number].append(step)
    for number in expected:
        pool.put(Failure(number, ErrorCode.INTERNAL, "the end"))
        expected[number].append("failure")
    pool.close()
    assert not recorder.overlapped
    assert recorder.seen == expected


def test_tokens_wait_for_the_prompt_that_a_thread_is_at():
    recorder = Recorder()
    recorder.prompt_gate.clear()
    pool = SenderPool(recorder, 2)
    pool.put(Prompt(1, np.empty(0)))
    pool.put(Failure(2, ErrorCode.INTERNAL, "of another"))
    while not recorder.seen[2]:
        time.sleep(0.001)
    pool.put_tokens(tokens_for([1, 3], 7))
    while not recorder.seen[3]:
        time.sleep(0.001)
    assert not recorder.seen[1]
    recorder.prompt_gate.set()
    pool.close()
    assert not recorder.overlapped
    assert recorder.seen[1] == ["prompt", 7]
