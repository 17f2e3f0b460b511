"""The requests an engine serves: their master rows, their state in every resource, and what was cached of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_

import numpy as np

from mstar.engine.batch import Batch
from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.base import Resource
from mstar.engine.resources.spec import ResourceReqConfig
from mstar.utils.errors import Unavailable


class RequestTable:
    """Master rows ``0 .. capacity - 1``, handed out highest first, row 0 last.

    ``cached``: request id -> leading prompt tokens that a prefix cache supplied, until the request's first step.
    """

    def __init__(
        self, capacity: int, resources: Mapping[str, Resource], forget: Callable[[int], None] = lambda request_id: None
    ) -> None:
        """``forget`` is called with the id of every request that leaves, for what others keep of it."""
        self.capacity = capacity
        self.cached: dict[int, int] = {}
        self._resources = resources
        every = resources.values()
        self._ingesting = [(key, each) for key, each in resources.items() if each.overrides("ingest_request")]
        self._removing = [each for each in every if each.overrides("remove_request")]
        self._caches = [each for each in every if each.overrides("enable_prefix_cache")]
        self._skipping = [each for each in every if each.overrides("apply_cached_prefix")]
        self._rebuilt = [(key, each) for key, each in resources.items() if each.is_rebuilt_by_tokens]
        self._evictable = [each for each in every if each.supports_eviction]
        self._forget = forget
        self._infos: dict[int, RequestInfo] = {}
        self._id_of_row = np.full(capacity, -1, np.int64)
        self._free_rows = [-row for row in range(capacity)]
        heapq.heapify(self._free_rows)

    def missing(self, batch: Batch) -> RequestInfo | None:
        """The first of the batch's requests that was not ingested."""
        if batch.rows is not None and batch.ids is not None and (self._id_of_row[batch.rows] == batch.ids).all():
            return None
        found = list(map(self._infos.get, batch.request_ids))
        if all(map(is_, found, batch.infos)):
            return None
        return next(info for info, held in zip(batch.infos, found, strict=True) if held is not info)

    def rows_of(self, request_ids: Sequence[int]) -> np.ndarray:
        """Master rows int64 of these requests; KeyError for one that is not here."""
        return np.array([self._infos[i].row for i in request_ids], np.int64)

    def ingest(self, info: RequestInfo) -> None:
        """Gives a request its row and its state in every resource, then whatever prefix of it is cached.

        Idempotent.  What a resource raises leaves nothing behind.

        Raises:
            ValueError: the id is negative (those belong to padding), or a resource refuses its parameters.
            Unavailable: all rows are taken.
        """
        if info.request_id < 0:
            raise ValueError(f"request_id must be >= 0, got {info.request_id}")
        if info.request_id in self._infos:
            return
        if not self._free_rows:
            raise Unavailable(f"all {self.capacity} rows of the engine are taken")
        info.row = -heapq.heappop(self._free_rows)
        self._infos[info.request_id] = info
        self._id_of_row[info.row] = info.request_id
        try:
            for key, resource in self._ingesting:
                resource.ingest_request(info.request_id, info.row, info.resource_configs.get(key))
            self._take_cached_prefix(info)
        except BaseException:
            self.remove(info.request_id)
            raise

    def remove(self, request_id: int) -> None:
        """Frees a request's row and its state in every resource; unknown ids are no error."""
        info = self._infos.pop(request_id, None)
        if info is None:
            return
        for resource in self._removing:
            resource.remove_request(request_id, info.row)
        heapq.heappush(self._free_rows, -info.row)
        self._id_of_row[info.row] = -1
        info.row = -1
        self.cached.pop(request_id, None)
        self._forget(request_id)

    def release(self, info: RequestInfo) -> None:
        """Lets go what the request's tokens can rebuild; row and all else stay."""
        for _, resource in self._rebuilt:
            resource.remove_request(info.request_id, info.row)
        self.cached.pop(info.request_id, None)

    def offload(self, info: RequestInfo) -> bool:
        """Moves what is rebuilt from tokens, and held by pages, to the host, all of it or nothing."""
        done: list[Resource] = []
        for resource in self._evictable:
            if not resource.offload(info.request_id):
                for each in done:
                    each.reload(info.request_id)
                return False
            done.append(resource)
        return bool(done)

    def reload(self, info: RequestInfo) -> bool:
        """The inverse, all of it or nothing."""
        can = all(resource.can_reload(info.request_id) for resource in self._evictable)
        return can and all(resource.reload(info.request_id) for resource in self._evictable)

    def resume(
        self,
        info: RequestInfo,
        prompt_ids: np.ndarray,
        configs: Mapping[str, ResourceReqConfig],
        has_generated: bool,
    ) -> None:
        """The inverse: the request comes back with ``prompt_ids``, its prompt and what it generated, less what is
        cached of these.  One that has generated nothing begins anew in every resource, but for what was prepared for
        it.  What a resource raises leaves it released."""
        info.prompt_ids, info.resource_configs, info.is_resumed = prompt_ids, configs, has_generated
        anew = self._rebuilt if has_generated else [(k, r) for k, r in self._ingesting if not _is_prepared(configs, k)]
        try:
            for key, resource in anew:
                resource.remove_request(info.request_id, info.row)
                resource.ingest_request(info.request_id, info.row, configs.get(key))
            self._take_cached_prefix(info, [resource for _, resource in anew])
        except BaseException:
            self.release(info)
            raise

    def _take_cached_prefix(self, info: RequestInfo, among: Collection[Resource] | None = None) -> None:
        """Every resource, or those of ``among``, begins behind the longest prefix that all caches hold; 0 where one
        cannot skip a prefix."""
        request_id, matched = info.request_id, 0
        caches = [resource for resource in self._caches if resource.enable_prefix_cache(request_id)]
        if caches and all(resource.prefix_skip_safe for resource in self._resources.values()):
            matched = min(resource.resolve_cached_prefix(request_id) for resource in caches)
        skipped = None if info.prompt_ids is None else info.prompt_ids[:matched]
        for resource in self._skipping:
            if among is None or resource in among:
                resource.apply_cached_prefix(request_id, info.row, matched, skipped)
        info.cached_tokens = matched
        if matched:
            self.cached[request_id] = matched


def _is_prepared(configs: Mapping[str, ResourceReqConfig], key: str) -> bool:
    config = configs.get(key)
    return config is not None and config.needs_preparation
