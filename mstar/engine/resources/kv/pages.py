"""The page arena: who owns which page.  Host only, vectorised."""

from __future__ import annotations

import threading

import numpy as np

from mstar.engine.resources.kv.config import NUM_RESERVED_PAGES

SINK_PAGE = 0


class PageArena:
    """First-in-first-out free list of page numbers ``1 .. num_pages - 1``.  Page 0, the sink, is never handed out.

    A page counts its owners: streams and leases that hold it, and the prefix index.  Only the index seals pages, and
    it owns every page it sealed: nobody writes a sealed page again, and a sealed page with one owner is *idle*, held
    by the index alone.  The last owner's release frees the page and clears the seal.

    Methods take a lock, because the plan thread allocates while the step thread frees.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = np.arange(NUM_RESERVED_PAGES, num_pages, dtype=np.int32)  # a ring: _count pages from _head
        self._head = 0
        self._count = self._free.size
        self._owners = np.zeros(num_pages, np.int32)
        self._owners[SINK_PAGE] = 1
        self._sealed = np.zeros(num_pages, bool)
        self._num_idle = 0
        self._stamp = np.empty(num_pages, np.int64)  # scratch of _distinct
        self._version = 0
        self._lock = threading.Lock()

    @property
    def num_usable(self) -> int:
        """All pages but the sink."""
        return self._free.size

    @property
    def num_free(self) -> int:
        return self._count

    @property
    def num_idle(self) -> int:
        """Sealed pages that the prefix index alone owns."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Pages free now or freed by evicting what the prefix index alone owns."""
        return self._count + self._num_idle

    @property
    def version(self) -> int:
        """Moves whenever an owner comes or goes, or a page is sealed."""
        return self._version

    def try_allocate(self, n: int) -> np.ndarray | None:
        """``n`` pages with one owner each, int32 [n], or None (and nothing taken) when fewer are free."""
        with self._lock:
            if n > self._count:
                return None
            pages = self._ring(n)
            self._head = (self._head + n) % self._free.size
            self._count -= n
            self._owners[pages] = 1
            self._version += 1
            return pages

    def share(self, pages: np.ndarray) -> None:
        """One more owner for each of ``pages`` [n], which must be owned.  A page named twice gets two."""
        if not len(pages):
            return
        with self._lock:
            distinct = self._distinct(pages)
            assert (self._owners[distinct] > 0).all(), "a free page is shared"
            assert (distinct != SINK_PAGE).all(), "the sink page is shared"
            self._add_owners(pages, distinct, 1)

    def release(self, pages: np.ndarray, is_distinct: bool = False) -> None:
        """One owner less for each of ``pages`` [n]; a page named twice loses two.  Pages without owners are freed.

        ``is_distinct``: no page is named twice, which need not be looked for then.
        """
        if not len(pages):
            return
        with self._lock:
            distinct = pages if is_distinct else self._distinct(pages)
            left = self._add_owners(pages, distinct, -1)
            assert self._owners[SINK_PAGE] == 1, "the sink page is freed"
            assert left.min() >= 0, "a page is freed twice"
            freed = distinct[left == 0]
            if freed.size:
                self._sealed[freed] = False
                self._put_behind(freed)

    def adopt(self, pages: np.ndarray) -> None:
        """:meth:`seal` and :meth:`share` of distinct pages that are owned and not sealed."""
        with self._lock:
            owners = self._owners[pages]
            assert owners.min() > 0, "a free page is sealed"
            assert not self._sealed[pages].any(), "a sealed page is sealed again"
            self._owners[pages] = owners + 1
            self._sealed[pages] = True
            self._version += 1

    def seal(self, pages: np.ndarray) -> None:
        """``pages`` [n], which must be owned, are not written again.  The prefix index seals what it takes."""
        with self._lock:
            distinct = self._distinct(pages)
            owners = self._owners[distinct]
            assert (owners > 0).all(), "a free page is sealed"
            self._num_idle += int(((owners == 1) & ~self._sealed[distinct]).sum())
            self._sealed[distinct] = True
            self._version += 1

    def is_sealed(self, pages: np.ndarray) -> np.ndarray:
        """bool [n]"""
        return self._sealed[pages]

    def free_idle(self, pages: np.ndarray) -> None:
        """:meth:`release` of distinct idle pages, by the prefix index."""
        with self._lock:
            assert (self._sealed[pages] & (self._owners[pages] == 1)).all(), "a page in use is evicted"
            self._owners[pages] = 0
            self._sealed[pages] = False
            self._num_idle -= pages.size
            self._put_behind(pages)
            self._version += 1

    def owners(self, pages: np.ndarray) -> np.ndarray:
        """Owner counts, int32 [n]."""
        return self._owners[pages]

    def check(self, references: np.ndarray) -> None:
        """Asserts conservation, given the pages that everybody else believes to hold.

        ``references`` [n] names each page once per owner (streams, leases, the index), the sink not at all.
        """
        free = self._ring(self._count)
        counted = np.bincount(references, minlength=self.num_pages)
        counted[SINK_PAGE] += 1
        assert np.array_equal(counted, self._owners), "owner counts differ from the references"
        is_free = np.zeros(self.num_pages, bool)
        is_free[free] = True
        assert int(is_free.sum()) == free.size, "a page is free twice"
        assert np.array_equal(is_free, self._owners == 0), "a page is lost, or both free and owned"
        assert self._sealed[self._owners > 1].all(), "a shared page is not sealed"
        assert not self._sealed[is_free].any(), "a free page is sealed"
        assert self._num_idle == int((self._sealed & (self._owners == 1)).sum()), "idle pages are miscounted"

    def _ring(self, n: int) -> np.ndarray:
        """The ``n`` longest free pages, a copy."""
        end = self._head + n
        if end <= self._free.size:
            return self._free[self._head : end].copy()
        return np.concatenate((self._free[self._head :], self._free[: end - self._free.size]))

    def _put_behind(self, pages: np.ndarray) -> None:
        """Adds ``pages`` to the free ones, as the last to be handed out."""
        size = self._free.size
        tail = (self._head + self._count) % size
        fitting = min(pages.size, size - tail)
        self._free[tail : tail + fitting] = pages[:fitting]
        self._free[: pages.size - fitting] = pages[fitting:]
        self._count += pages.size

    def _distinct(self, pages: np.ndarray) -> np.ndarray:
        """``pages`` with each once, where it stands last."""
        order = np.arange(len(pages))
        self._stamp[pages] = order
        return pages[self._stamp[pages] == order]

    def _add_owners(self, pages: np.ndarray, distinct: np.ndarray, change: int) -> np.ndarray:
        """Returns how many each of ``distinct`` has now."""
        before = self._owners[distinct]
        if distinct.size == len(pages):
            after = self._owners[distinct] = before + change
        else:
            np.add.at(self._owners, pages, change)
            after = self._owners[distinct]
        is_sealed = self._sealed[distinct]
        self._num_idle += np.count_nonzero(after[is_sealed] == 1) - np.count_nonzero(before[is_sealed] == 1)
        self._version += 1
        return after
