"""A long prompt among streams that run, on a real server: how long these have to wait for it."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from golden import CASES, MODEL, greedy
from load_client import Call, Crowd, until
from load_size import IS_FULL, sized
from repository_entries import write_model_entry
from serving_client import ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.model, pytest.mark.timeout(900)]

STREAMS = 32
CHUNK = 256  # prompt tokens of one step
PROMPT = sized(1536, full=6000)
ENGLISH = CASES[:3]  # a part of a character would be held back: a longer gap that is nobody's fault
NOISE = 1.8  # of two times of one length, on a machine that does other things too; two parts would be 2


@dataclass(frozen=True)
class Waits:
    """Seconds, each the longest gap in any stream, but ``usual``, a median; ``step_tokens`` is what the stream that got
    least got while the long prompt ran."""

    usual: float
    long_prompt: float
    one_chunk: float
    first_token: float
    step_tokens: int

    def __str__(self) -> str:
        return (
            f"{PROMPT} tokens among {STREAMS} streams: gaps of {self.usual:.2f} s, of {self.long_prompt:.2f} s beside "
            f"the prompt, of {self.one_chunk:.2f} s beside one part of it as late; first token after "
            f"{self.first_token:.1f} s, by when each stream had got {self.step_tokens} or more"
        )


@pytest.fixture
def serve(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[bool], ServerProcess]:
    def start(chunked_prefill: bool) -> ServerProcess:
        folder = tmp_path / str(chunked_prefill)
        folder.mkdir()
        limits = {"max_seq_len": "8192", "max_batch_tokens": str(CHUNK), "max_running_requests": str(STREAMS + 1)}
        # One thread: two on cores that others use too wait for each other, and steps of one length differ by far more.
        write_model_entry(
            tmp_path / "repository", MODEL, chunked_prefill=str(chunked_prefill).lower(), num_threads="1", **limits
        )
        server = ServerProcess(tmp_path / "repository", folder)
        request.addfinalizer(server.stop)
        return server

    return start


async def waits_beside_a_long_prompt(server: ServerProcess) -> Waits:
    words = [random.randrange(1000, 40000) for _ in range(PROMPT + 3 * CHUNK)]

    async with Crowd(server, MODEL) as crowd:
        streams = [crowd.send(greedy(ENGLISH[n % 3], 400, stream=True)) for n in range(STREAMS)]
        await until(lambda: all(len(call.times) > 8 for call in streams))

        async def beside(prompt: list[int]) -> tuple[Call, float, int]:
            """The prompt's call, the longest gap that overlaps it, and the tokens of the stream that got least."""
            call = crowd.send({"input_ids": prompt, "max_tokens": 1, "temperature": 0.0})
            assert (await call.end(400)).error is None
            [end] = call.times
            await until(lambda: all(stream.times[-1] > end for stream in streams))
            gaps = [longest_gap(stream, call.sent, end) for stream in streams]
            return call, max(gaps), min(tokens_between(stream, call.sent, end) for stream in streams)

        usual = statistics.median(gap for stream in streams for gap in stream.gaps[-8:])
        long_call, long_gap, step_tokens = await beside(words[:PROMPT])
        # What has been computed is in the prefix cache: of these a last part is left, as far back as the prompt's.
        one_chunk = [(await beside(words[: PROMPT + part * CHUNK]))[1] for part in (1, 2, 3)]
        assert not any(stream.is_over for stream in streams)
    return Waits(usual, long_gap, max(one_chunk), long_call.seconds, step_tokens)


def longest_gap(call: Call, begin: float, end: float) -> float:
    """Of the gaps that overlap the time from ``begin`` to ``end``."""
    return max(later - earlier for earlier, later in pairwise(call.times) if earlier < end and begin < later)


def tokens_between(call: Call, begin: float, end: float) -> int:
    return sum(count for count, at in zip(call.tokens, call.times, strict=True) if begin < at <= end)


def test_a_long_prompt_keeps_streams_waiting_for_one_part_of_it_at_a_time(serve):
    chunked = asyncio.run(waits_beside_a_long_prompt(serve(True)))
    print(f"in parts of {CHUNK}: {chunked}")
    # Each part's step has a token for each stream; the last may come after the prompt's own, or wait for its text.
    assert chunked.step_tokens >= PROMPT // CHUNK - 2
    assert chunked.long_prompt < NOISE * chunked.one_chunk
    assert chunked.long_prompt < chunked.first_token / 2


@pytest.mark.skipif(not IS_FULL, reason="takes minutes; FULL_LOAD_TESTS=1 runs it")
def test_without_parts_they_wait_for_all_of_it(serve):
    whole = asyncio.run(waits_beside_a_long_prompt(serve(False)))
    print(f"whole: {whole}")
    assert whole.step_tokens <= 3
    assert whole.long_prompt > whole.first_token / 2
