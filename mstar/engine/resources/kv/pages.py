"""The page arena: who owns which page.  Host only, vectorised."""

from __future__ import annotations

import numpy as np

from mstar.engine.resources.kv.config import NUM_RESERVED_PAGES

SINK_PAGE = 0


class PageArena:
    """First-in-first-out free list of page numbers ``1 .. num_pages - 1``.  Page 0, the sink, is never handed out."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = np.arange(NUM_RESERVED_PAGES, num_pages, dtype=np.int32)  # a ring: _count pages from _head
        self._head = 0
        self._count = self._free.size
        self._is_owned = np.zeros(num_pages, bool)
        self._is_owned[SINK_PAGE] = True

    @property
    def num_usable(self) -> int:
        return self._free.size

    @property
    def num_free(self) -> int:
        return self._count

    def try_allocate(self, n: int) -> np.ndarray | None:
        """``n`` pages, int32 [n], or None (and nothing taken) when fewer are free."""
        if n > self._count:
            return None
        pages = self._free[(self._head + np.arange(n)) % self._free.size]
        self._head = (self._head + n) % self._free.size
        self._count -= n
        self._is_owned[pages] = True
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Takes back ``pages`` [n]; each must be owned, and named once."""
        assert self._is_owned[pages].all(), "a page is freed twice"
        assert (pages != SINK_PAGE).all(), "the sink page is freed"
        self._is_owned[pages] = False
        tail = self._head + self._count
        self._free[(tail + np.arange(pages.size)) % self._free.size] = pages
        self._count += pages.size

    def check(self, owned: np.ndarray) -> None:
        """Asserts that free pages and ``owned`` [n], the pages that streams hold, are all pages, each once."""
        free = self._free[(self._head + np.arange(self._count)) % self._free.size]
        every = np.concatenate(([SINK_PAGE], free, owned))
        assert every.size == self.num_pages, "pages are lost or held twice"
        assert np.array_equal(np.sort(every), np.arange(self.num_pages)), "a page has two owners"
