"""Requests that wait for room, first come first served, within bounds."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mstar.conductor.request import EngineRequest


@dataclass(frozen=True)
class Limits:
    """What the conductor lets in, and how it runs it.

    ``max_queued_tokens`` 0 is no bound; it counts prompt tokens.  ``max_batch_tokens`` bounds the prompt tokens of
    one step, unless a single prompt is longer.  ``run_ahead`` launches a step before the tokens of the one before
    are on the host; ``mixed_steps`` runs prompts beside rows that generate, where the model has a walk for it.
    """

    max_running_requests: int
    max_queued_requests: int
    max_batch_tokens: int
    max_seq_len: int
    vocab_size: int
    max_queued_tokens: int = 0
    run_ahead: bool = False
    mixed_steps: bool = False


class Waiting(NamedTuple):
    """An accepted request without a row; ``limit`` is the most tokens it may generate."""

    request_id: int
    client: int
    ticket: int
    request: EngineRequest
    limit: int

    @property
    def total_tokens(self) -> int:
        """Longest its stream can get."""
        return self.request.num_prompt_tokens + self.limit


class WaitQueue:
    """First in, first out; any request can leave at any time."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Waiting] = OrderedDict()
        self.num_tokens = 0
        self.num_pushed = 0  # ever: tells whether somebody arrived since

    def __len__(self) -> int:
        return len(self._requests)

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

    def is_over(self, limits: Limits) -> str | None:
        """Which bound is exceeded, in words; None within all."""
        if len(self) > limits.max_queued_requests:
            return f"max_queued_requests: at most {limits.max_queued_requests} requests may wait, the queue is full"
        if limits.max_queued_tokens and self.num_tokens > limits.max_queued_tokens:
            return (
                f"max_queued_tokens: at most {limits.max_queued_tokens} prompt tokens may wait, "
                f"with this request they would be {self.num_tokens}"
            )
        return None
