"""A few threads that send responses, each owning the streams whose ticket falls to it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mstar.utils.errors import ErrorCode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokens:
    """Rows of one or several steps, in order: tickets int64 [n], tokens int32 [n], finish uint8 [n]."""

    tickets: np.ndarray
    tokens: np.ndarray
    finish: np.ndarray


@dataclass(frozen=True)
class Failure:
    """A request that ends with an error."""

    ticket: int
    code: ErrorCode
    message: str


TokenHandler = Callable[[int, np.ndarray, int], None]
FailureHandler = Callable[[Failure], None]


class SenderPool:
    """Shards of a request's work by ``ticket % size``, so that what is sent for one request stays in order.

    A send is one slow round trip. Whatever arrives for a shard meanwhile is taken up in its next pass, in which all
    new tokens of a stream become one response: that is the coalescing under back-pressure.
    """

    def __init__(self, on_tokens: TokenHandler, on_failure: FailureHandler, size: int = 4) -> None:
        """``on_tokens(ticket, tokens, finish)`` and ``on_failure`` run on the shard's thread."""
        self._shards = [_Shard(on_tokens, on_failure, f"mstar-sender-{index}") for index in range(size)]

    def put_tokens(self, rows: Tokens) -> None:
        """Hand one step's rows to their shards; never blocks."""
        shard_of = rows.tickets % len(self._shards)
        for index, shard in enumerate(self._shards):
            mine = np.flatnonzero(shard_of == index)
            if mine.size:
                shard.put(Tokens(rows.tickets[mine], rows.tokens[mine], rows.finish[mine]))

    def put_failure(self, failure: Failure) -> None:
        """End a request with an error, after everything that was put for it before."""
        self._shards[failure.ticket % len(self._shards)].put(failure)

    def close(self) -> None:
        """Work off what was put, then end the threads."""
        for shard in self._shards:
            shard.put(None)
        for shard in self._shards:
            shard.thread.join()


class _Shard:
    def __init__(self, on_tokens: TokenHandler, on_failure: FailureHandler, name: str) -> None:
        self._on_tokens = on_tokens
        self._on_failure = on_failure
        self._inbox: deque[Tokens | Failure | None] = deque()  # None: the end
        self._filled = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, item: Tokens | Failure | None) -> None:
        self._inbox.append(item)
        self._filled.set()

    def _run(self) -> None:
        while True:
            self._filled.wait()
            self._filled.clear()  # before draining: a put in between only causes an empty pass
            items = [self._inbox.popleft() for _ in range(len(self._inbox))]
            rows: list[Tokens] = []
            for item in items:
                if isinstance(item, Tokens):
                    rows.append(item)
                    continue
                self._pass_tokens(rows)
                rows = []
                if item is None:
                    return
                self._guarded(self._on_failure, item)
            self._pass_tokens(rows)

    def _pass_tokens(self, rows: list[Tokens]) -> None:
        for ticket, tokens, finish in group_by_ticket(rows):
            self._guarded(self._on_tokens, ticket, tokens, finish)

    def _guarded(self, handler: Callable[..., None], *args: object) -> None:
        try:
            handler(*args)
        except Exception:  # one stream's trouble must not end the thread that serves the others
            logger.exception("a response could not be handled")


def group_by_ticket(rows: list[Tokens]) -> Iterator[tuple[int, np.ndarray, int]]:
    """One ``(ticket, tokens in order, last finish)`` per ticket in ``rows``."""
    if not rows:
        return
    if len(rows) == 1:
        tickets, tokens, finish = rows[0].tickets, rows[0].tokens, rows[0].finish
    else:
        tickets = np.concatenate([row.tickets for row in rows])
        tokens = np.concatenate([row.tokens for row in rows])
        finish = np.concatenate([row.finish for row in rows])
    order = np.argsort(tickets, kind="stable")
    tickets, tokens, finish = tickets[order], tokens[order], finish[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(tickets)) + 1, [tickets.size]])
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        yield int(tickets[start]), tokens[start:end], int(finish[end - 1])
