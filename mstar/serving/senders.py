"""A few threads that send responses, each owning the requests whose number falls to it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from mstar.runtime.messages import TokenRows
from mstar.serving.rows import TicketRows, group_by_ticket, pick
from mstar.serving.sequences import numbers_of
from mstar.utils.errors import ErrorCode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """What is told of a prompt's tokens: LOGPROB [tokens - 1]."""

    number: int
    records: np.ndarray


@dataclass(frozen=True)
class Failure:
    """A request that ends with an error; ``ticket`` names the sequence that failed, None stands for all of them."""

    number: int
    code: ErrorCode
    message: str
    ticket: int | None = None


Item: TypeAlias = TokenRows | Prompt | Failure


class Handler(Protocol):
    """What the shards' threads call, in the order in which it was put for a request."""

    def handle_tokens(self, rows: TicketRows) -> None: ...

    def handle_prompt(self, prompt: Prompt) -> None: ...

    def handle_failure(self, failure: Failure) -> None: ...


class SenderPool:
    """Shards of work by request number modulo ``size``, so that what is sent for one request stays in order.

    A send is one slow round trip. Whatever arrives for a shard meanwhile is taken up in its next pass, in which all
    new tokens of a ticket become one response: that is the coalescing under back-pressure.
    """

    def __init__(self, handler: Handler, size: int = 4) -> None:
        self._shards = [_Shard(handler, f"mstar-sender-{index}") for index in range(size)]

    def put_tokens(self, rows: TokenRows) -> None:
        """Hand one step's rows to their shards; never blocks."""
        shard_of = numbers_of(rows.tickets) % len(self._shards)
        for index, shard in enumerate(self._shards):
            mine = np.flatnonzero(shard_of == index)
            if mine.size:
                shard.put(pick(rows, mine))

    def put(self, item: Prompt | Failure) -> None:
        """Hand over what concerns one request, to be taken after everything that was put for it before."""
        self._shards[item.number % len(self._shards)].put(item)

    def close(self) -> None:
        """Work off what was put, then end the threads."""
        for shard in self._shards:
            shard.put(None)
        for shard in self._shards:
            shard.thread.join()


class _Shard:
    def __init__(self, handler: Handler, name: str) -> None:
        self._handler = handler
        self._inbox: deque[Item | None] = deque()  # None: the end
        self._filled = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, item: Item | None) -> None:
        self._inbox.append(item)
        self._filled.set()

    def _run(self) -> None:
        while True:
            self._filled.wait()
            self._filled.clear()  # before draining: a put in between only causes an empty pass
            items = [self._inbox.popleft() for _ in range(len(self._inbox))]
            rows: list[TokenRows] = []
            for item in items:
                if isinstance(item, TokenRows):
                    rows.append(item)
                    continue
                self._pass_tokens(rows)
                rows = []
                if item is None:
                    return
                if isinstance(item, Prompt):
                    self._guarded(self._handler.handle_prompt, item)
                else:
                    self._guarded(self._handler.handle_failure, item)
            self._pass_tokens(rows)

    def _pass_tokens(self, rows: list[TokenRows]) -> None:
        for of_ticket in group_by_ticket(rows):
            self._guarded(self._handler.handle_tokens, of_ticket)

    def _guarded(self, handle: Callable[..., None], item: object) -> None:
        try:
            handle(item)
        except Exception:  # one request's trouble must not end the thread that serves the others
            logger.exception("a response could not be handled")
