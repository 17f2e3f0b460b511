"""What captures cost at load, bucket by bucket: seconds, and device memory."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from mstar.engine.resources.step import BucketKey

log = logging.getLogger(__name__)


class CapturesGraphs(Protocol):
    """What is asked of a backend; its free memory only where it ``budgets_memory``."""

    capture_at_load: bool
    budgets_memory: bool

    def free_memory(self) -> int: ...


@dataclass
class CaptureCost:
    """Of all slots of a bucket.  ``bytes`` were taken from the device, 0 where earlier captures' memory served."""

    slots: int = 0
    seconds: float = 0.0
    bytes: int = 0


class CaptureCosts:
    """Adds up ``by_bucket``, in the order of capture; empty where nothing is captured at load."""

    def __init__(self, backend: CapturesGraphs) -> None:
        self.by_bucket: dict[BucketKey, CaptureCost] = {}
        self._backend = backend
        self._last_free: int | None = None  # asking waits for the device

    @contextlib.contextmanager
    def of(self, key: BucketKey) -> Iterator[None]:
        """Around the capture of one slot."""
        if not self._backend.capture_at_load:
            yield
            return
        free = self._free() if self._last_free is None else self._last_free
        start = time.perf_counter()
        yield
        cost = self.by_bucket.setdefault(key, CaptureCost())
        cost.slots += 1
        cost.seconds += time.perf_counter() - start
        self._last_free = self._free()
        cost.bytes += free - self._last_free

    def tell(self, name: str) -> None:
        """Logs a line for each bucket and one for all."""
        costs = self.by_bucket
        for key, cost in costs.items():
            log.info(
                "%s: %s: %d slots in %.2f s, %.1f MB", name, key, cost.slots, cost.seconds, max(cost.bytes, 0) / 1e6
            )
        if costs:
            seconds, taken = sum(cost.seconds for cost in costs.values()), sum(cost.bytes for cost in costs.values())
            log.info("%s: captured %d buckets in %.1f s, %.1f MB", name, len(costs), seconds, taken / 1e6)

    def _free(self) -> int:
        return self._backend.free_memory() if self._backend.budgets_memory else 0
