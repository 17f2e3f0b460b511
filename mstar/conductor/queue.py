"""Requests that wait for room, first come first served, within bounds."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mstar.conductor.request import EngineRequest
from mstar.engine.inputs import RequestInfo


@dataclass(frozen=True)
class Limits:
    """What the conductor lets in, and how it runs it.

    ``max_queued_tokens`` 0 is no bound; it counts prompt tokens.  ``max_batch_tokens`` bounds the prompt tokens of
    one step, unless a single prompt is longer.  ``run_ahead`` launches a step before the tokens of the one before
    are on the host, ``max_steps_ahead`` of them where all they need is on the device; ``mixed_steps`` runs prompts
    beside rows that generate, where the model has a walk for it.
    """

    max_running_requests: int
    max_queued_requests: int
    max_batch_tokens: int
    max_seq_len: int
    vocab_size: int
    max_queued_tokens: int = 0
    run_ahead: bool = False
    max_steps_ahead: int = 1
    mixed_steps: bool = False

    def refusal(self, num_waiting: int, num_tokens: int) -> str | None:
        """Which bound so many requests that wait, with so many prompt tokens, exceed, in words; None: they may wait."""
        if num_waiting > self.max_queued_requests:
            return f"max_queued_requests: at most {self.max_queued_requests} requests may wait, the queue is full"
        if self.max_queued_tokens and num_waiting and num_tokens > self.max_queued_tokens:
            return (
                f"max_queued_tokens: at most {self.max_queued_tokens} prompt tokens may wait, "
                f"with this request they would be {num_tokens}"
            )
        return None


class Waiting(NamedTuple):
    """An accepted request without a row: ``limit`` is the most tokens it may generate, ``info`` the engine's part."""

    request_id: int
    client: int
    ticket: int
    request: EngineRequest
    limit: int
    info: RequestInfo


class WaitQueue:
    """First in, first out; any request can leave at any time."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Waiting] = OrderedDict()
        self.num_tokens = 0
        self.num_pushed = 0  # ever: tells whether somebody arrived since

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Waiting]:
        """All, longest first; not to be changed meanwhile."""
        return iter(self._requests.values())

    def push(self, waiting: Waiting) -> None:
        self._requests[waiting.request_id] = waiting
        self.num_tokens += waiting.request.num_prompt_tokens
        self.num_pushed += 1

    def head(self) -> Waiting | None:
        """The one that waits longest."""
        return next(iter(self._requests.values()), None)

    def first(self, count: int) -> Iterator[Waiting]:
        """The ``count`` that wait longest, in order."""
        return itertools.islice(self._requests.values(), count)

    def remove(self, request_id: int) -> Waiting | None:
        waiting = self._requests.pop(request_id, None)
        if waiting is not None:
            self.num_tokens -= waiting.request.num_prompt_tokens
        return waiting
