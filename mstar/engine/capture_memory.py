"""How much device memory captures may take: what a step needs at its peak stays free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryUse:
    """One eager forward: bytes allocated at its peak, and bytes its allocator took from the device."""

    peak: int
    reserved: int


class MeasuresMemory(Protocol):
    """What a budget asks of a backend that ``budgets_memory``, and of no other."""

    budgets_memory: bool

    def measure(self, forward: Callable[[], Any]) -> MemoryUse: ...

    def free_memory(self) -> int: ...


class CaptureBudget:
    """Decides, bucket by bucket in capture order, what may be captured on one device.

    ``floor`` (bytes) is the largest peak of any bucket of any runner: the first eager step of that size must still
    fit when all captures are made.
    """

    def __init__(self, backend: MeasuresMemory) -> None:
        self._backend = backend
        self._use: dict[Hashable, MemoryUse] = {}
        self.floor = 0

    @property
    def is_limited(self) -> bool:
        return self._backend.budgets_memory

    def measure(self, key: Hashable, forward: Callable[[], Any]) -> None:
        """Runs a bucket's forward once in eager form and keeps what it took; before any capture, once per bucket."""
        if self.is_limited and key not in self._use:
            self._use[key] = use = self._backend.measure(forward)
            self.floor = max(self.floor, use.peak)

    def allows(self, key: Hashable) -> bool:
        """Whether capturing this bucket now leaves ``floor`` bytes free; always true of a bucket never measured."""
        use = self._use.get(key)
        if use is None:
            return True
        free = self._backend.free_memory()
        if free - use.reserved >= self.floor:
            return True
        log.warning(
            "%s: not captured, its %.0f MB would leave less than %.0f MB of %.0f MB free",
            key,
            use.reserved / 1e6,
            self.floor / 1e6,
            free / 1e6,
        )
        return False
