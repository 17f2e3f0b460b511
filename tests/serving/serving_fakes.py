"""An engine driven by the test, and a reply that remembers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from mstar.runtime.messages import EngineRequest, FinishReason
from mstar.serving.frontend import Frontend
from mstar.serving.responses import Chunk
from mstar.utils.errors import ErrorCode


class RecordingReply:
    """Remembers what was sent; ``gate`` (set by default) holds sends back while it is clear."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.errors: list[tuple[ErrorCode, str]] = []
        self.ends = 0
        self.cancelled = False
        self.gate = threading.Event()
        self.gate.set()
        self.over = threading.Event()

    def send(self, chunk: Chunk, *, final: bool) -> None:
        assert not self.over.is_set(), "a response after the final one"
        self.gate.wait(10)
        self.chunks.append(chunk)
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

    def step(self, tokens: dict[int, int], finish: dict[int, FinishReason] | None = None) -> None:
        """One step: a token per ticket."""
        tickets = np.fromiter(tokens, np.int64)
        ends = np.array([(finish or {}).get(ticket, 0) for ticket in tokens], np.uint8)
        self.frontend.on_tokens(tickets, np.fromiter(tokens.values(), np.int32), ends)

    def emit(self, ticket: int, ids: list[int], finish: FinishReason = FinishReason.RUNNING) -> None:
        """One step per id for one ticket; the last carries ``finish``."""
        for index, token in enumerate(ids):
            self.step({ticket: token}, {ticket: finish} if index + 1 == len(ids) else None)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)
