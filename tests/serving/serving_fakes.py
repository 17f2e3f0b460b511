"""An engine driven by the test, and a reply that remembers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from mstar.conductor.request import LOGPROB
from mstar.runtime.messages import EngineRequest, FinishReason, TokenRows
from mstar.serving.chunks import Chunk
from mstar.serving.frontend import Frontend
from mstar.utils.errors import ErrorCode


def record(logprob: float, rank: int = 1, top: dict[int, float] | None = None) -> np.ndarray:
    """One LOGPROB record [1], with these most likely tokens."""
    made = np.zeros(1, LOGPROB)
    made["logprob"], made["rank"], made["top_ids"] = logprob, rank, -1
    for place, (token_id, value) in enumerate((top or {}).items()):
        made["top_ids"][0, place], made["top_logprobs"][0, place] = token_id, value
    return made


def records(logprobs: Sequence[float]) -> np.ndarray:
    """LOGPROB records [n] of tokens with these log-probabilities."""
    return np.concatenate([np.empty(0, LOGPROB), *(record(value) for value in logprobs)])


class RecordingReply:
    """Remembers what was sent; ``gate`` (set by default) holds sends back while it is clear."""

    def __init__(self) -> None:
        self.responses: list[tuple[Chunk, ...]] = []
        self.errors: list[tuple[ErrorCode, str]] = []
        self.ends = 0
        self.cancelled = False
        self.gate = threading.Event()
        self.gate.set()
        self.over = threading.Event()

    def send(self, chunks: Sequence[Chunk], *, final: bool) -> None:
        assert not self.over.is_set(), "a response after the final one"
        self.gate.wait(10)
        self.responses.append(tuple(chunks))
        if final:
            self._end()

    def fail(self, code: ErrorCode, message: str) -> None:
        assert not self.over.is_set(), "an error after the final response"
        self.errors.append((code, message))
        self._end()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def _end(self) -> None:
        self.ends += 1
        self.over.set()

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for response in self.responses for chunk in response]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def usage(self) -> int:
        return sum(chunk.num_output_tokens for chunk in self.chunks)


class ManualEngine:
    """An engine whose steps the test makes."""

    def __init__(self) -> None:
        self.alive = True
        self.submitted: dict[int, EngineRequest] = {}
        self.cancelled: list[int] = []
        self.finished: dict[int, int] = {}
        self.frontend: Frontend

    def submit(self, ticket: int, request: EngineRequest) -> None:
        self.submitted[ticket] = request

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    def finish(self, ticket: int, kept_tokens: int) -> None:
        self.finished[ticket] = kept_tokens

    def is_alive(self) -> bool:
        return self.alive

    def step(
        self,
        tokens: dict[int, int],
        finish: dict[int, FinishReason] | None = None,
        logprobs: dict[int, float] | None = None,
    ) -> None:
        """One step: a token per ticket, and the log-probabilities of some."""
        tickets = np.fromiter(tokens, np.int64)
        ends = np.array([(finish or {}).get(ticket, 0) for ticket in tokens], np.uint8)
        rows = TokenRows(tickets, np.fromiter(tokens.values(), np.int32), ends)
        if logprobs:
            told = [row for row, ticket in enumerate(tokens) if ticket in logprobs]
            values = [logprobs[ticket] for ticket in tokens if ticket in logprobs]
            rows = rows._replace(logprob_rows=np.array(told), logprobs=records(values))
        self.frontend.on_tokens(rows)

    def emit(
        self,
        ticket: int,
        ids: list[int],
        finish: FinishReason = FinishReason.RUNNING,
        logprobs: Sequence[float] = (),
    ) -> None:
        """One step per id for one ticket; the last carries ``finish``."""
        for index, token in enumerate(ids):
            ends = {ticket: finish} if index + 1 == len(ids) else None
            self.step({ticket: token}, ends, {ticket: logprobs[index]} if logprobs else None)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)
