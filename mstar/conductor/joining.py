"""Who of those that wait joins next."""

from __future__ import annotations

from collections.abc import Hashable

from mstar.conductor.pools import Pools
from mstar.conductor.queue import Waiting
from mstar.conductor.wait_queue import WaitQueue


class Joining:
    """The queue's order; where the pools fill gaps, others may pass a head that has to wait for pages.

    A refusal is remembered until the pools or the head change.
    """

    def __init__(self, queue: WaitQueue, pools: Pools) -> None:
        self._queue = queue
        self._pools = pools
        self._window = pools.window
        self._refused: set[int] = set()
        self._refused_at: tuple[Hashable, ...] = ()  # the pools and the head by which _refused was told
        self._seen = -1  # arrivals when the last look found nobody

    def next(self) -> Waiting | None:
        """The one to ingest now, still in the queue; None when nobody can join."""
        head = self._queue.head()
        if head is None:
            return None
        if self._refused:
            if (self._pools.version, head.request_id) != self._refused_at:
                self._refused, self._seen = set(), -1
            elif self._queue.num_pushed == self._seen:
                return None
        for waiting in self._queue.first(self._window):
            if waiting.request_id not in self._refused:
                if self._fits(waiting, head):
                    return waiting
                if not self._refused:
                    self._refused_at = (self._pools.version, head.request_id)
                self._refused.add(waiting.request_id)
        self._seen = self._queue.num_pushed
        return None

    def _fits(self, waiting: Waiting, head: Waiting) -> bool:
        configs = waiting.info.resource_configs
        may_join = self._pools.can_join(configs)
        return may_join and (waiting is head or self._pools.may_pass(configs, head.info.resource_configs))
