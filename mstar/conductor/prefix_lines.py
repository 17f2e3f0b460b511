"""Those that wait by what they share with the prefix cache."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from mstar.conductor.pools import Pools
from mstar.conductor.queue import Place
from mstar.engine.resources.kv.prefix.index import PrefixIndex


class _Line:
    """Requests of one tenant and priority whose prompts have the same middle page, first come first.

    ``is_listed``: an entry of it is in its heap.
    """

    __slots__ = ("is_listed", "key", "places")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.places: OrderedDict[int, Place] = OrderedDict()
        self.is_listed = False


_Heap = list[tuple[int, _Line]]  # numbers of lines' first places, or of places that were


class PrefixLines:
    """For each tenant and priority, the first of those that wait whose prompt is half in the prefix cache, or more.

    A request's line is named by the key of the page at the middle of its prompt.  The index tells which of these keys
    come; that they have gone is found out when somebody looks.  So nothing ever looks through the lines: a heap has
    those whose page has come, by arrival.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._lines: dict[bytes, dict[tuple[str, int], _Line]] = {}  # by key, then tenant and priority
        self._heaps: dict[tuple[str, int], _Heap] = {}
        self._key_of: dict[int, bytes] = {}  # by request id

    def __len__(self) -> int:
        return len(self._key_of)

    def add(self, place: Place) -> None:
        """A request begins to wait."""
        prefixes = self._pools.prefixes
        key = None if prefixes is None else prefixes.middle_key(self._pools.prefix_config(place.waiting.info))
        if prefixes is None or key is None:
            return
        request = place.waiting.request
        group = request.tenant, request.request_priority
        lines = self._lines.get(key)
        if lines is None:
            lines = self._lines[key] = {}
            prefixes.index.watch(key)
        line = lines.get(group)
        if line is None:
            line = lines[group] = _Line(key)
        line.places[place.waiting.request_id] = place
        self._key_of[place.waiting.request_id] = key
        if not line.is_listed and prefixes.index.holds(key):
            self._list(group, line)

    def remove(self, place: Place) -> None:
        """A request waits no more."""
        key = self._key_of.pop(place.waiting.request_id, None)
        if key is None:
            return
        request, lines = place.waiting.request, self._lines[key]
        group = request.tenant, request.request_priority
        line = lines[group]
        del line.places[place.waiting.request_id]
        if not line.places:
            del lines[group]
            if not lines:
                del self._lines[key]
                assert self._pools.prefixes is not None
                self._pools.prefixes.index.unwatch(key)

    def end(self, tenant: str, priority: int) -> None:
        """Nobody of this tenant and priority waits any more."""
        self._heaps.pop((tenant, priority), None)

    def first(self, tenant: str, priorities: Iterable[int]) -> Iterator[Place]:
        """Of each of these priorities of the tenant, the first of whose prompt at least the half is cached, if any."""
        prefixes = self._pools.prefixes
        assert prefixes is not None
        index = prefixes.index
        for key in index.take_arrived():
            for group, line in self._lines[key].items():
                if not line.is_listed:
                    self._list(group, line)
        for priority in priorities:
            heap = self._heaps.get((tenant, priority))
            place = heap and self._first_of(heap, index)
            if place:
                yield place

    def _first_of(self, heap: _Heap, index: PrefixIndex) -> Place | None:
        while heap:
            number, line = heap[0]
            place = next(iter(line.places.values()), None)
            if place is None or not index.holds(line.key):
                heapq.heappop(heap)
                line.is_listed = False
            elif place.number != number:
                heapq.heapreplace(heap, (place.number, line))
            else:
                return place
        return None

    def _list(self, group: tuple[str, int], line: _Line) -> None:
        first = next(iter(line.places.values()))
        heapq.heappush(self._heaps.setdefault(group, []), (first.number, line))
        line.is_listed = True
