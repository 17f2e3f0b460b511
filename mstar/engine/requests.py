"""The requests an engine serves: their master rows, their state in every resource, and what was cached of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from operator import is_

import numpy as np

from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.base import Resource
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
        self._forget = forget
        self._infos: dict[int, RequestInfo] = {}
        self._free_rows = [-row for row in range(capacity)]
        heapq.heapify(self._free_rows)

    def missing(self, infos: Sequence[RequestInfo], request_ids: Sequence[int]) -> RequestInfo | None:
        """The first of these requests that was not ingested; ``request_ids`` are theirs."""
        found = list(map(self._infos.get, request_ids))
        if all(map(is_, found, infos)):
            return None
        return next(info for info, held in zip(infos, found, strict=True) if held is not info)

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
        info.row = -1
        self.cached.pop(request_id, None)
        self._forget(request_id)

    def _take_cached_prefix(self, info: RequestInfo) -> None:
        """Every resource begins behind the longest prefix that all caches hold; 0 where one cannot skip a prefix."""
        request_id, matched = info.request_id, 0
        caches = [resource for resource in self._caches if resource.enable_prefix_cache(request_id)]
        if caches and all(resource.prefix_skip_safe for resource in self._resources.values()):
            matched = min(resource.resolve_cached_prefix(request_id) for resource in caches)
        skipped = None if info.prompt_ids is None else info.prompt_ids[:matched]
        for resource in self._skipping:
            resource.apply_cached_prefix(request_id, info.row, matched, skipped)
        info.cached_tokens = matched
        if matched:
            self.cached[request_id] = matched
