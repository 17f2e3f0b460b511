"""Requests whose state waits on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from mstar.engine.resources.kv.config import KVReqConfig
from mstar.engine.resources.kv.offloading import Offloading
from mstar.engine.resources.kv.questions import KVQuestions
from mstar.engine.resources.step import ADMITTED, AdmitOutcome


class KVEviction(KVQuestions):
    """The part of the manager that moves requests' pages to the host and back."""

    _offloading: Offloading | None
    _configs: dict[int, KVReqConfig]
    _row_of: dict[int, int]

    def is_offloaded(self, request_id: int) -> bool:
        return self._offloading is not None and self._offloading.is_offloaded(self._row_of[request_id])

    def offload(self, request_id: int) -> bool:
        row = self._row_of[request_id]
        is_moved = self._offloading is not None and self._offloading.offload(row)
        if is_moved and self._gate.fit == "none":  # whoever may run out of pages is promised none while it is away
            self._gate.forget(np.array([row]))
        return is_moved

    def can_reload(self, request_id: int) -> bool:
        if self._offloading is None:
            return False
        return 0 < self._offloading.pages_of(self._row_of[request_id]) <= self.free_pages

    def reload(self, request_id: int) -> bool:
        self._departures.settle()
        row = self._row_of[request_id]
        is_back = self._offloading is not None and self._offloading.reload(row)
        if is_back and self._gate.fit == "none":
            self._gate.reserve(row, self._demand(self._configs[request_id], 0))
        return is_back

    def reclaimable(self, request_id: int) -> int:
        return 0 if self._offloading is None else self._offloading.reclaimable(self._row_of[request_id])

    def get_offload_priority(self, request_id: int) -> float:
        return float(self.reclaimable(request_id))

    def admit_retrieve(self, request_id: int, node: str, graph_walk: str, published: Any) -> AdmitOutcome:
        """Brings an offloaded request back for a step of this node and walk; not ready while there is no room."""
        if self._offloading is None or not self.is_offloaded(request_id):
            return ADMITTED
        row = np.array([self._row_of[request_id]])
        labels = self._configs[request_id].labels_of(node, graph_walk)
        needed = np.concatenate([self._streams.of(label, row) for label in labels])
        if self._offloading.first_offloaded(needed) is None or self.reload(request_id):
            return ADMITTED
        return AdmitOutcome(ready=False)
