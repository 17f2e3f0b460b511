"""Who of those that wait joins next."""

from __future__ import annotations

from collections.abc import Hashable

from mstar.conductor.configs import RequestConfigs
from mstar.conductor.pools import Pools
from mstar.conductor.queue import Waiting, WaitQueue
from mstar.engine.inputs import RequestInfo


class Joining:
    """First come, first served; where the pools fill gaps, others may pass a head that has to wait for pages.

    A refusal is remembered until the pools or the head change.
    """

    def __init__(self, queue: WaitQueue, pools: Pools, configs: RequestConfigs) -> None:
        self._queue = queue
        self._pools = pools
        self._configs = configs
        self._window = pools.window
        self._infos: dict[int, RequestInfo] = {}  # of those that were looked at
        self._refused: set[int] = set()
        self._refused_at: tuple[Hashable, ...] = ()  # the pools and the head by which _refused was told
        self._seen = -1  # arrivals when the last look found nobody

    def next(self) -> tuple[Waiting, RequestInfo] | None:
        """The one to ingest now, still in the queue; None when nobody can join."""
        head = self._queue.head()
        if head is None:
            return None
        if self._refused:
            if (self._pools.version, head.request_id) != self._refused_at:
                self._refused, self._seen = set(), -1
            elif self._queue.num_pushed == self._seen:
                return None
        looked, found = {}, None
        for waiting in self._queue.first(self._window):
            info = looked[waiting.request_id] = self._info(waiting)
            if waiting.request_id not in self._refused:
                if self._fits(info, looked[head.request_id]):
                    found = waiting, info
                    break
                if not self._refused:
                    self._refused_at = (self._pools.version, head.request_id)
                self._refused.add(waiting.request_id)
        else:
            self._infos, self._seen = looked, self._queue.num_pushed
        return found

    def _info(self, waiting: Waiting) -> RequestInfo:
        return self._infos.get(waiting.request_id) or self._configs.describe(waiting)

    def _fits(self, info: RequestInfo, head: RequestInfo) -> bool:
        configs = info.resource_configs
        return self._pools.can_join(configs) and (info is head or self._pools.may_pass(configs, head.resource_configs))
