"""A pool of host memory to which streams' pages are moved while their requests wait."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class OffloadClaim:
    """Host pages ``slots`` int64 [n] that hold, or will hold, a copy of a stream's pages.

    ``generation`` is the stream's when the copy was started.  ``done`` is recorded behind the copies, None where they
    are synchronous.
    """

    slots: np.ndarray
    generation: int
    done: torch.cuda.Event | None = None


class NoHostMemory(Exception):
    """The host has not the memory that a pool would take; says how much, and why not."""


class OffloadPool:
    """Copies of whole streams in ``num_pages`` pages of host memory, page-locked where the cache is on a GPU.

    A stream moves out in two steps.  :meth:`claim` reserves host pages and starts the copy, on a stream of its own on
    a GPU, so that steps of other requests go on.  :meth:`settle` waits for it and says whether the copy is still what
    the cache holds; only then may the cache's pages be freed.  Owners are whatever the caller names its streams by.

    ``lock`` guards the claims.  Whoever starts a step of a stream marks it in flight under the same lock, so that a
    claim sees either the mark or a stream at rest.
    """

    def __init__(self, cache: torch.Tensor, num_pages: int) -> None:
        """``cache`` [layers, pages, …] is the device's.

        Raises:
            NoHostMemory: the pool cannot be allocated.
        """
        self.lock = threading.RLock()
        self.num_pages = num_pages
        self._cache = cache
        on_gpu = cache.device.type == "cuda"
        layers, _, *page = cache.shape
        # Page first, so that each copy's host side is contiguous: only then is it asynchronous.
        try:
            self._host = torch.empty((num_pages, layers, *page), dtype=cache.dtype, pin_memory=on_gpu)
        except RuntimeError as error:
            size = cache.nbytes // cache.shape[1] * num_pages
            raise NoHostMemory(f"{size} bytes, which cannot be allocated ({str(error).splitlines()[0]})") from None
        self._free = list(range(num_pages - 1, -1, -1))
        self._claims: dict[Hashable, OffloadClaim] = {}
        self._side = torch.cuda.Stream(cache.device) if on_gpu else None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holds(self, owner: Hashable) -> bool:
        """Whether the pool has, or is making, a copy of this stream."""
        return owner in self._claims

    def pages_held(self, owner: Hashable) -> int:
        """Pages of the stream's copy; KeyError without one."""
        return self._claims[owner].slots.size

    def claim(self, owner: Hashable, pages: np.ndarray, generation: int, is_in_flight: bool = False) -> bool:
        """Reserves room for ``pages`` [n] of the cache and starts to copy them.

        False, and no effect, while a step of the stream is in flight, when it is claimed already, or without room; no
        effect either when the copy raises.
        """
        with self.lock:
            if is_in_flight or owner in self._claims or len(pages) > len(self._free):
                return False
            left = len(self._free) - len(pages)
            slots = np.array(self._free[left:], np.int64)
            done = self._copy(slots, pages, to_host=True)
            del self._free[left:]
            self._claims[owner] = OffloadClaim(slots, generation, done)
            return True

    def settle(self, owner: Hashable, generation: int) -> bool:
        """Waits for the copy.  True: the stream is as it was, and its pages in the cache may be freed.

        False: its ``generation`` has moved since the claim, which is given up.
        """
        with self.lock:
            claim = self._claims[owner]
            if claim.done is not None:
                claim.done.synchronize()
            if claim.generation != generation:
                self.drop(owner)
                return False
            return True

    def reload(self, owner: Hashable, pages: np.ndarray) -> None:
        """Copies a settled stream back to ``pages`` [n] of the cache, bit for bit, and frees its host pages.

        Work issued afterwards on the current stream sees the pages.
        """
        with self.lock:
            claim = self._claims[owner]
            assert len(pages) == claim.slots.size, "a stream comes back to as many pages as it left"
            done = self._copy(claim.slots, pages, to_host=False)
            if done is not None:
                torch.cuda.current_stream(self._cache.device).wait_event(done)
                done.synchronize()  # the host pages are free for another claim's copy from here on
            self.drop(owner)

    def drop(self, owner: Hashable) -> None:
        """Gives a stream's host pages back.  Unknown owners are no error."""
        with self.lock:
            claim = self._claims.pop(owner, None)
            if claim is None:
                return
            if claim.done is not None:
                claim.done.synchronize()
            self._free.extend(claim.slots.tolist())

    def check(self) -> None:
        """Asserts that every host page is free or claimed, once."""
        claimed = [claim.slots for claim in self._claims.values()]
        every = np.concatenate([np.array(self._free, np.int64), *claimed])
        assert np.array_equal(np.sort(every), np.arange(self.num_pages)), "host pages are lost or claimed twice"

    def _copy(self, slots: np.ndarray, pages: np.ndarray, *, to_host: bool) -> torch.cuda.Event | None:
        if self._side is None:
            self._copy_pages(slots, pages, to_host)
            return None
        self._side.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._side):
            self._copy_pages(slots, pages, to_host)
            return self._side.record_event()

    def _copy_pages(self, slots: np.ndarray, pages: np.ndarray, to_host: bool) -> None:
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            host, cached = self._host[slot], self._cache[:, page]
            target, source = (host, cached) if to_host else (cached, host)
            target.copy_(source, non_blocking=True)
