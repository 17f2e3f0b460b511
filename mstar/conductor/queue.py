"""What the conductor lets in, and a request that it let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mstar.conductor.request import EngineRequest
from mstar.engine.inputs import RequestInfo
from mstar.utils.errors import shorten


@dataclass(frozen=True)
class Limits:
    """What the conductor lets in, and how it runs it.

    ``max_queued_tokens``, which counts prompt tokens, and ``max_queued_requests_per_tenant`` bound nothing where they
    are 0.  ``max_batch_tokens`` bounds the prompt tokens of one step; a prompt that does not fit comes in parts with
    ``chunked_prefill``, else in a step of its own.
    ``target_inter_token_ns`` lets rows that generate wait about that long for a step with parts of prompts, 0 for as
    long as it takes.  ``run_ahead`` launches a step before the tokens of the one before are on the host,
    ``max_steps_ahead`` of them where all they need is on the device; ``mixed_steps`` runs prompts beside rows that
    generate, where the model has a walk for it.  A request that waits gains one level of priority every
    ``priority_ageing_s`` seconds, and in the fair share between tenants a generated token counts as
    ``output_token_weight`` prompt tokens; ``prefix_passes`` bounds how often later ones of its tenant may pass it that
    find more in the prefix cache: see :class:`~mstar.conductor.wait_queue.WaitQueue`.  ``preemption`` is one of the
    ways of :class:`~mstar.conductor.way_back.WayBack`.
    """

    max_running_requests: int
    max_queued_requests: int
    max_batch_tokens: int
    max_seq_len: int
    vocab_size: int
    max_queued_tokens: int = 0
    max_queued_requests_per_tenant: int = 0
    run_ahead: bool = False
    max_steps_ahead: int = 1
    mixed_steps: bool = False
    chunked_prefill: bool = True
    target_inter_token_ns: int = 0
    priority_ageing_s: float = 1.0
    output_token_weight: float = 2.0
    prefix_passes: int = 0
    preemption: str = "auto"

    def refusal(self, num_waiting: int, num_tokens: int, tenant: str, num_of_tenant: int) -> str | None:
        """Which bound those who wait exceed, in words; None: they may.

        ``num_waiting`` requests with ``num_tokens`` prompt tokens, ``num_of_tenant`` of them of ``tenant``, whose
        request came last.
        """
        if num_waiting > self.max_queued_requests:
            return queue_full(self.max_queued_requests)
        if self.max_queued_tokens and num_waiting and num_tokens > self.max_queued_tokens:
            return (
                f"max_queued_tokens: at most {self.max_queued_tokens} prompt tokens may wait, "
                f"with this request they would be {num_tokens}"
            )
        if 0 < self.max_queued_requests_per_tenant < num_of_tenant:
            return (
                f"max_queued_requests_per_tenant: at most {self.max_queued_requests_per_tenant} requests of one tenant "
                f"may wait, so many of {shorten(tenant)} do"
            )
        return None


def num_waiting(num_without_row: int, num_coming: int, num_free_rows: int) -> int:
    """Of the requests without a row, those that count as waiting.

    ``num_coming`` of them lack only a row, or will soon; for as many as there are free rows, nobody has to make room.
    """
    return num_without_row - min(num_coming, num_free_rows)


def queue_full(max_queued_requests: int) -> str:
    """What a client is told whose request finds no place; front ends that see it coming say the same."""
    return f"max_queued_requests: at most {max_queued_requests} requests may wait, the queue is full"


class Waiting(NamedTuple):
    """An accepted request without a row: ``limit`` is the most tokens it may generate, ``info`` the engine's part."""

    request_id: int
    client: int
    ticket: int
    request: EngineRequest
    limit: int
    info: RequestInfo


class Place(NamedTuple):
    """Where a request stands: ``number`` counts arrivals.  ``height`` is its priority less the ageing intervals that
    had passed when it came; with those passed by now, that is its level."""

    waiting: Waiting
    number: int
    height: int
