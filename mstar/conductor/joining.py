"""Who of those that wait joins next."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice

from mstar.conductor.pools import Pools
from mstar.conductor.queue import Waiting
from mstar.conductor.wait_queue import WaitQueue


class Joining:
    """The queue's order; where the pools fill gaps, others may pass a head that has to wait for pages.

    Who joins in the place of a head that has its pages is asked for them too; else it is the head after all.

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
        if head.request_id not in self._refused:
            if self._pools.can_join(head.info.resource_configs):
                return self._in_place_of(head)
            self._refused_at = (self._pools.version, head.request_id)
            self._refused.add(head.request_id)
        for waiting in islice(self._queue.first(self._window), 1, None):
            if waiting.request_id not in self._refused:
                if self._may_pass(waiting, head):
                    return waiting
                self._refused.add(waiting.request_id)
        self._seen = self._queue.num_pushed
        return None

    def _may_pass(self, waiting: Waiting, head: Waiting) -> bool:
        configs = waiting.info.resource_configs
        return (
            self._pools.can_join(configs)
            and self._pools.may_pass(configs, head.info.resource_configs)
            and self._queue.may_pass(waiting, self._window)
        )

    def _in_place_of(self, head: Waiting) -> Waiting:
        preferred = self._queue.preferred()
        if preferred is None or not self._pools.can_join(preferred.info.resource_configs):
            return head
        return preferred
