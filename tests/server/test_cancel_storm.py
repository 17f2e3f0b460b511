"""Clients of a real server that leave at random moments, beside clients that stay."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from typing import Any

import grpc
import pytest
from golden import CASES, MODEL, greedy
from load_client import Call, Crowd, counters_at_rest, until
from load_size import sized

from mstar.runtime.board import Slot

pytestmark = [pytest.mark.server, pytest.mark.model]

OK, CANCELLED = grpc.StatusCode.OK, grpc.StatusCode.CANCELLED
STORM_S = sized(8.0, full=60.0)
STAYING, LEAVING = 8, 8  # more than the server's rows, so that some leave the queue
TOKENS = 16  # of a stream that stays
SHORT = [case for case in CASES if len(case["prompt_ids"]) < 50]


class Storm:
    """What its clients got, until ``end`` on the monotonic clock."""

    def __init__(self, crowd: Crowd, end: float) -> None:
        self._crowd = crowd
        self._end = end
        self._ids = itertools.count()
        self.texts: list[tuple[dict[str, Any], Call]] = []  # of those that stayed
        self.moments: Counter[str] = Counter()  # at which the others left

    async def stay(self) -> None:
        while time.monotonic() < self._end:
            case = random.choice(SHORT)
            # The id of one that leaves at about the same time: ids are labels, and no reason to end with it.
            call = self._crowd.send(greedy(case, TOKENS, stream=True), request_id=str(next(self._ids) % 4))
            await call.end()
            self.texts.append((case, call))

    async def leave(self) -> None:
        while time.monotonic() < self._end:
            await self._leave_after(random.choice([0, 0, 1, 3, math.inf]))

    async def _leave_after(self, responses: float) -> None:
        """Leaves a moment after so many responses; after all of them that is too late."""
        max_tokens = 2 if responses == math.inf else 1000
        call = self._crowd.send(
            greedy(random.choice(SHORT), max_tokens, stream=True), request_id=str(next(self._ids) % 4)
        )
        await until(lambda: call.is_over or len(call.times) >= responses)
        await asyncio.sleep(random.uniform(0, 0.1))
        was_over = call.is_over
        self.moments["over" if was_over else "running" if call.times else "no token yet"] += 1
        assert not (call.cancel() and was_over)
        assert not call.cancel(), "a second cancel found something to cancel"
        await call.end()
        assert call.status == (OK if True in call.answer.finals else CANCELLED)


def test_who_stays_gets_the_text_it_gets_alone_whoever_leaves_beside_it(exact_server):
    before = counters_at_rest(exact_server)

    async def run() -> Storm:
        async with Crowd(exact_server, MODEL) as crowd:
            storm = Storm(crowd, time.monotonic() + STORM_S)
            async with asyncio.TaskGroup() as clients:
                for client in [storm.stay] * STAYING + [storm.leave] * LEAVING:
                    clients.create_task(client())
        return storm

    storm = asyncio.run(run())
    for case, call in storm.texts:
        assert (call.answer.error, call.answer.finish_reason) == (None, "length"), case["name"]
        assert call.answer.token_ids == case["output_ids"][:TOKENS], case["name"]
        assert call.answer.finals.count(True) == 1
    counters = counters_at_rest(exact_server)
    told = counters - before
    print(f"{STORM_S:.0f} s: {len(storm.texts)} stayed, {dict(storm.moments)} left")
    assert len(storm.texts) >= STAYING
    assert min(storm.moments[moment] for moment in ("over", "running", "no token yet")) > 0
    # Each ended once, but for those that left before the server had read their request.
    assert len(storm.texts) + storm.moments["over"] <= told[Slot.FINISHED_LENGTH]
    assert told[Slot.FINISHED_CANCELLED] + told[Slot.FINISHED_LENGTH] <= len(storm.texts) + storm.moments.total()
    assert told[Slot.FAILED] == told[Slot.REFUSED] == 0
    assert counters[Slot.KV_PAGES_USED] == counters[Slot.QUEUED_TOKENS] == 0
