"""Padding rows: master rows beyond the requests' own, with ids that stay the same for the life of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.base import Resource


@dataclass(frozen=True)
class PaddedTail:
    """The padding rows of one step."""

    ids: tuple[int, ...]
    rows: list[int]

    def reset(self, resources: Iterable[Resource]) -> None:
        """Back to length 0."""
        for resource in resources:
            resource.reset_rows(self.ids, self.rows)


@dataclass(frozen=True)
class PaddingPool:
    """The padding rows of one capture slot; smaller buckets use a prefix.  ``ids`` <= -2, ``rows`` int64."""

    ids: tuple[int, ...]
    rows: np.ndarray
    infos: tuple[RequestInfo, ...]
    _tails: dict[tuple[int, int], PaddedTail] = field(default_factory=dict)

    def ingest(self, resources: Iterable[Resource]) -> None:
        """Makes the rows known to the resources, with default parameters."""
        for resource in resources:
            for info in self.infos:
                resource.ingest_request(info.request_id, info.row, None)

    def tail(self, start: int, stop: int) -> PaddedTail:
        """Rows ``start`` to ``stop``."""
        tail = self._tails.get((start, stop))
        if tail is None:
            rows = self.rows[start:stop].tolist()
            tail = self._tails[start, stop] = PaddedTail(self.ids[start:stop], rows)
        return tail

    def reset(self, resources: Iterable[Resource], start: int, stop: int, free: bool = False) -> None:
        """Rows ``start`` to ``stop`` back to length 0; with ``free`` they own nothing afterwards."""
        for resource in resources:
            resource.reset_rows(self.ids[start:stop], self.rows[start:stop].tolist(), free=free)


class PaddingRows:
    """Hands out master rows from ``capacity`` upwards, one pool per name; the n-th padding row has id ``-2 - n``."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pools: dict[str, PaddingPool] = {}
        self.total = 0

    def pool(self, name: str, size: int) -> PaddingPool:
        """The pool of that name, made with ``size`` rows on first use."""
        if name not in self._pools:
            ids = tuple(-2 - n for n in range(self.total, self.total + size))
            rows = np.arange(self._capacity + self.total, self._capacity + self.total + size, dtype=np.int64)
            infos = tuple(RequestInfo(request_id=i, row=int(row)) for i, row in zip(ids, rows, strict=True))
            self._pools[name] = PaddingPool(ids, rows, infos)
            self.total += size
        return self._pools[name]
