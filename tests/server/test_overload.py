"""More clients than the rows and the queue of a real server hold."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from golden import CASES, MODEL, board, greedy
from load_client import Call, Crowd, counters_at_rest, until
from repository_entries import write_model_entry
from serving_client import ServerProcess, ask, post

from mstar.runtime.board import Slot

pytestmark = [pytest.mark.server, pytest.mark.model]

RUNNING, QUEUED = 8, 100
QUEUE_FULL = "max_queued_requests: at most 100 requests may wait, the queue is full"


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("overload_repository")
    limits = {"max_running_requests": str(RUNNING), "max_queued_requests": str(QUEUED), "max_seq_len": "1024"}
    write_model_entry(repository, MODEL, **limits)
    server = ServerProcess(repository, tmp_path_factory.mktemp("overload_server"))
    yield server
    server.stop()


def question(number: int, max_tokens: int = 8) -> dict[str, Any]:
    """About 20 tokens that begin as nobody else's."""
    text = f"{number} people asked what the weather will be like in the city tomorrow, and the answer was"
    return {"text_input": text, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}


def wait_served(server: ServerProcess) -> None:
    """Every row, place and page is back, and the next one is answered as ever."""
    assert ask(server, MODEL, **greedy(CASES[0], 8)).token_ids == CASES[0]["output_ids"][:8]
    counters = counters_at_rest(server)
    assert counters[Slot.QUEUED_TOKENS] == counters[Slot.KV_PAGES_USED] == 0


def test_of_a_thousand_at_once_as_many_are_answered_as_fit_and_the_rest_refused_at_once(small_server):
    counters = board(small_server)
    before = counters_at_rest(small_server)

    def num_accepted() -> int:
        return counters.running + counters.queued + counters[Slot.FINISHED_LENGTH]

    async def run() -> tuple[list[Call], list[Call]]:
        async with Crowd(small_server, MODEL) as crowd:
            thousand = [crowd.send(question(number)) for number in range(1000)]
            await until(lambda: sum(call.is_over for call in thousand) > 500 and counters.queued <= QUEUED // 2)
            accepted = num_accepted()
            leavers = [crowd.send(question(number)) for number in range(1000, 1050)]
            await until(lambda: num_accepted() >= accepted + len(leavers))
            for call in leavers:
                await asyncio.sleep(random.uniform(0, 0.005))
                call.cancel()
            for call in thousand + leavers:
                await call.end()
        return thousand, leavers

    thousand, leavers = asyncio.run(run())
    answered = [call for call in thousand if call.answer.error is None]
    refused = [call for call in thousand if call.answer.error is not None]
    for call in answered:
        assert (call.answer.usage, call.answer.finish_reason, call.answer.finals) == (8, "length", [True])
    for call in refused:
        assert (call.status, call.answer.error, call.times) == (grpc.StatusCode.UNAVAILABLE, QUEUE_FULL, [])
    for call in leavers:
        assert (call.status, call.times) == (grpc.StatusCode.CANCELLED, [])
    assert len(answered) >= RUNNING + QUEUED
    last_refusal = max(call.ended for call in refused)
    assert sum(call.ended < last_refusal for call in answered) < len(answered) / 2

    told = counters_at_rest(small_server) - before
    assert told[Slot.REFUSED] <= len(refused)  # the front end, which sees how many wait, refused the others
    assert told[Slot.FINISHED_LENGTH] == len(answered)
    assert told[Slot.FINISHED_CANCELLED] == len(leavers)
    assert told[Slot.GENERATED_TOKENS] == 8 * len(answered)
    assert told[Slot.PROMPT_TOKENS] == sum(call.answer.num_input_tokens for call in answered)  # no leaver's
    wait_served(small_server)


def test_who_waits_is_served_in_the_order_of_arrival_and_a_full_queue_refuses_within_a_step(small_server):
    counters = board(small_server)
    num_early = QUEUED - 40

    async def run() -> list[Call]:
        async with Crowd(small_server, MODEL) as crowd:
            holders = [crowd.send(greedy(case, 500, stream=True)) for case in CASES[:RUNNING]]
            await until(lambda: counters.running == RUNNING)
            queued = [crowd.send(question(number, max_tokens=2)) for number in range(num_early)]
            await until(lambda: counters.queued == num_early)
            while len(queued) < QUEUED:  # one by one: only so their order is ours
                queued.append(crowd.send(question(len(queued), max_tokens=2)))
                await until(lambda: counters.queued == len(queued))
            refused = []
            for _ in range(9):
                refused.append(crowd.send(question(QUEUED)))
                await refused[-1].end()
            assert {call.answer.error for call in refused} == {QUEUE_FULL}
            status, body = await asyncio.to_thread(post, small_server, MODEL, question(QUEUED))
            assert (status >= 400, json.loads(body)) == (True, {"error": QUEUE_FULL})
            step_s = statistics.median(gap for call in holders for gap in call.gaps)
            assert statistics.median(call.seconds for call in refused) < 2 * step_s
            assert not any(call.is_over for call in holders + queued)
            for call in holders:
                call.cancel()
            for call in queued:
                assert (await call.end()).finish_reason == "length"
        return queued

    queued = asyncio.run(run())
    order = sorted(range(QUEUED), key=lambda number: queued[number].times[0])
    places = {number: place for place, number in enumerate(order) if number >= num_early}
    # Rows that ran side by side may end in any order.
    assert max(abs(place - number) for number, place in places.items()) < RUNNING
    wait_served(small_server)
