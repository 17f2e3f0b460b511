"""A chat of eight turns with a real server, each prompt of which holds all turns before."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
from golden import MODEL
from load_client import Crowd, counters_at_rest
from serving_client import ServerProcess

from mstar.runtime.board import Slot

pytestmark = [pytest.mark.server, pytest.mark.model]

TOPICS = ["rivers", "bridges", "clocks", "glass", "salt", "maps", "ink", "wind"]
QUESTION = (
    "Now please tell me about {}. Where do they come from, who was the first to write about them, what have people "
    "used them for in towns and in the country, and what would be different today if there had never been any? "
    "Keep it to one short sentence that a child of ten years understands, without any numbers and without any names."
)
PAGE = 16  # the option's default
ANSWER = 8


@dataclass(frozen=True)
class Turn:
    """What one turn's request got; times in seconds, ``cached`` in tokens of the prompt."""

    token_ids: list[int]
    text: str
    prompt_tokens: int
    cached: int
    first_token: float


async def take_turn(crowd: Crowd, server: ServerProcess, messages: list, no_cache: bool) -> Turn:
    before = counters_at_rest(server)
    asked = {"messages": json.dumps(messages), "max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
    call = crowd.send(asked | {"stream": True, "return_token_ids": True, "no_cache": no_cache})
    answer = await call.end()
    assert answer.error is None
    told = counters_at_rest(server) - before
    first_token = call.times[0] - call.sent
    return Turn(
        answer.token_ids, answer.text, answer.num_input_tokens, int(told[Slot.CACHED_PROMPT_TOKENS]), first_token
    )


def test_later_turns_begin_sooner_with_the_prefix_cache_and_say_the_same(exact_server):
    async def chat() -> list[tuple[Turn, Turn]]:
        turns, messages = [], []
        async with Crowd(exact_server, MODEL) as crowd:
            for topic in TOPICS:
                messages.append({"role": "user", "content": QUESTION.format(topic)})
                both = [await take_turn(crowd, exact_server, messages, no_cache) for no_cache in (True, False)]
                turns.append((both[0], both[1]))
                messages.append({"role": "assistant", "content": both[1].text})
        return turns

    turns = asyncio.run(chat())
    for number, (without, cached) in enumerate(turns, 1):
        print(
            f"turn {number}: {cached.prompt_tokens} tokens, {cached.cached} of them cached; first token after "
            f"{cached.first_token:.2f} s, without the cache after {without.first_token:.2f} s"
        )
    for without, cached in turns:
        assert cached.token_ids == without.token_ids
        assert len(cached.token_ids) == ANSWER
        assert without.cached == 0
    for (_, before), (_, cached) in pairwise(turns):
        # All full pages of the last prompt, but for the tokens that ask for an answer.
        assert cached.cached > before.prompt_tokens - 2 * PAGE
    late = turns[len(turns) // 2 :]
    assert sum(cached.first_token for _, cached in late) < sum(without.first_token for without, _ in late) / 2
