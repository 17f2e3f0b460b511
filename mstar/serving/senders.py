"""A few threads that send responses, each request's by one of them at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeAlias, cast

import numpy as np

from mstar.runtime.messages import TokenRows
from mstar.serving.rows import Row, TicketRows, group_by_ticket, rows_of
from mstar.serving.sequences import SEQUENCE_BITS
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


Item: TypeAlias = Row | Prompt | Failure


class Handler(Protocol):
    """What the threads call, in the order in which it was put for a request."""

    def handle_tokens(self, rows: TicketRows) -> None: ...

    def handle_prompt(self, prompt: Prompt) -> None: ...

    def handle_failure(self, failure: Failure) -> None: ...


class SenderPool:
    """Items wait by their request's number; a thread that is free takes the request whose turn it is, with all of them.

    A send is one slow round trip.  Whatever comes for a request until its turn, all new tokens of a ticket, becomes one
    response: that is the coalescing under back-pressure.  A request is in one thread's hands at a time, so that what is
    sent for it stays in order; while it is, its turn does not come.  A request's first response goes before what is
    further sent for others: numbers ascend, so one above all before it is new (one that was overtaken takes its turn).

    Under ``_lock``: ``_waiting`` items by number; ``_first`` and ``_ready`` numbers that wait for a thread, in turn;
    ``_held`` numbers in a thread's hands (a number with items is in one of the three); ``_newest`` the highest number
    that had items; ``_idle`` the locks that idle threads sleep on.
    """

    def __init__(self, handler: Handler, size: int = 2) -> None:
        self._handler = handler
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Item]] = {}
        self._first: deque[int] = deque()
        self._ready: deque[int] = deque()
        self._newest = -1
        self._held: set[int] = set()
        self._idle: list[threading.Lock] = []
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"mstar-sender-{index}", daemon=True) for index in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def put_tokens(self, rows: TokenRows) -> None:
        """Hand over one step's rows; never blocks on a send."""
        waiting, held = self._waiting, self._held
        with self._lock:
            for row in rows_of(rows):  # once per token: nothing here may cost a call
                number = row[0] >> SEQUENCE_BITS
                if number in waiting:
                    waiting[number].append(row)
                    continue
                waiting[number] = [row]
                is_new = number > self._newest
                if is_new:
                    self._newest = number
                if number not in held:  # as a new one can be: what is told of its prompt came before
                    (self._first if is_new else self._ready).append(number)
            self._wake()

    def put(self, item: Prompt | Failure) -> None:
        """Hand over what concerns one request, to be taken after everything that was put for it before."""
        number = item.number
        with self._lock:
            if number in self._waiting:
                self._waiting[number].append(item)
            else:
                self._waiting[number] = [item]
                if number not in self._held:
                    self._ready.append(number)
            self._wake()

    def close(self) -> None:
        """Work off what was put, then end the threads."""
        with self._lock:
            self._is_closing = True
            for asleep in self._idle:
                asleep.release()
            self._idle.clear()
        for thread in self._threads:
            thread.join()

    def _wake(self) -> None:
        """One thread per request whose turn has come, as far as there are idle ones; the last to sleep wakes first."""
        for _ in range(min(len(self._first) + len(self._ready), len(self._idle))):
            self._idle.pop().release()

    def _run(self) -> None:
        asleep = threading.Lock()
        asleep.acquire()
        number: int | None = None
        while True:
            with self._lock:
                if number is not None:
                    self._put_back(number)
                turns = self._first or self._ready
                number = turns.popleft() if turns else None
                if number is not None:
                    self._held.add(number)
                    items = self._waiting.pop(number)
                elif self._is_closing:
                    return
                else:
                    self._idle.append(asleep)
            if number is None:
                asleep.acquire()
            else:
                self._handle(items)

    def _put_back(self, number: int) -> None:
        self._held.remove(number)
        if number in self._waiting:
            self._ready.append(number)

    def _handle(self, items: list[Item]) -> None:
        for kind, run in groupby(items, type):
            if kind is tuple:
                for of_ticket in group_by_ticket(cast(list[Row], list(run))):
                    self._guarded(self._handler.handle_tokens, of_ticket)
            else:
                handle = self._handler.handle_prompt if kind is Prompt else self._handler.handle_failure
                for item in run:
                    self._guarded(handle, item)

    def _guarded(self, handle: Callable[..., None], item: object) -> None:
        try:
            handle(item)
        except Exception:  # one request's trouble must not end the thread that serves the others
            logger.exception("a response could not be handled")
