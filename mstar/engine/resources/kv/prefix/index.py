"""The prefix index: which page holds which content, for later requests to share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mstar.engine.resources.kv.pages import SINK_PAGE, PageArena
from mstar.engine.resources.kv.prefix.keys import PrefixItem, chain_root, page_keys

NO_PAGE = SINK_PAGE  # the sink is never indexed
_NO_PAGES = np.empty(0, np.int32)


@dataclass(eq=False, slots=True)
class PrefixMatch:
    """The pages that hold the beginning of a prompt.

    ``pages`` int32 [m]; ``keys``: of all full pages of the prompt, the first m of them matched; ``root``: the key
    that the first page follows.
    """

    pages: np.ndarray
    keys: list[bytes]
    root: bytes

    @property
    def num_pages(self) -> int:
        return self.pages.size


class PrefixIndex:
    """Content key to page.  The index owns its pages and has them sealed.

    An entry is known by its page: arrays by page number hold its token ids, its depth (pages before it), when it was
    last used, and the entry before it.  Links name that entry's page and serial, so that a link to an evicted entry
    is dead even when its page holds another entry by now.

    ``counters``: "hits" and "misses" of leases, "hit_tokens", "insertions", "evictions".
    """

    def __init__(self, arena: PageArena, page_size: int, root: bytes) -> None:
        self.counters: Counter[str] = Counter()
        self._arena = arena
        self._page_size = page_size
        self._root = root
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        n = arena.num_pages
        self._ids = np.zeros((n, page_size), np.int32)
        self._depth = np.zeros(n, np.int32)
        self._used = np.zeros(n, np.int64)
        self._serial = np.zeros(n, np.int64)  # 0: no entry
        self._parent = np.zeros(n, np.int32)
        self._parent_serial = np.zeros(n, np.int64)
        self._ranked = np.empty(0, np.int32)  # idle pages in the order of their eviction
        self._ranked_used = np.empty(0, np.int64)  # their last use when they were ranked
        self._place = np.empty(n, np.int64)  # scratch of _rank
        self._clock = 0
        self._watched: set[bytes] = set()
        self._arrived: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def num_evictable(self) -> int:
        """Pages that :meth:`evict` could free now."""
        return self._arena.num_idle

    def pages(self) -> np.ndarray:
        """Every indexed page once, int32 [n]."""
        return np.flatnonzero(self._serial).astype(np.int32)

    def keys(self, ids: np.ndarray, items: Sequence[PrefixItem] = (), salt: str = "") -> tuple[bytes, list[bytes]]:
        """The chain root of a request and the keys of all full pages of its prompt ``ids`` [n]."""
        root = chain_root(self._root, salt)
        return root, page_keys(root, ids, items, self._page_size)

    def match(self, ids: np.ndarray, items: Sequence[PrefixItem] = (), salt: str = "") -> PrefixMatch:
        """The longest indexed beginning of prompt ``ids`` [n]: whole pages, and never its last token.

        Takes nothing: :meth:`lease` the match before anything else may evict.
        """
        return self.match_keys(ids, self.keys(ids, items, salt)[1], salt)

    def match_keys(self, ids: np.ndarray, keys: list[bytes], salt: str = "") -> PrefixMatch:
        """:meth:`match` of a prompt whose full pages have these ``keys``."""
        return PrefixMatch(self.find(ids, keys), keys, chain_root(self._root, salt))

    def find(self, ids: np.ndarray, keys: Sequence[bytes]) -> np.ndarray:
        """Pages of the longest indexed beginning of prompt ``ids`` whose full pages have these ``keys``, int32 [m]."""
        size, found = self._page_size, []
        for key in keys[: max(len(ids) - 1, 0) // size]:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        if not found:
            return _NO_PAGES
        pages = np.array(found, np.int32)
        wanted = np.asarray(ids[: len(found) * size]).reshape(len(found), size)
        is_equal = (self._ids[pages] == wanted).all(1) & (self._depth[pages] == np.arange(len(found)))
        return pages if is_equal.all() else pages[: int(np.argmin(is_equal))]

    def holds(self, key: bytes) -> bool:
        """Whether a page of this key is here."""
        return key in self._page_of

    def watch(self, key: bytes) -> None:
        """:meth:`take_arrived` tells from now on when a page of this key comes."""
        self._watched.add(key)

    def unwatch(self, key: bytes) -> None:
        self._watched.discard(key)
        self._arrived.discard(key)

    def take_arrived(self) -> set[bytes]:
        """Watched keys of which a page came since the last call."""
        arrived = self._arrived
        if arrived:
            self._arrived = set()
        return arrived

    def num_in_use(self, pages: np.ndarray) -> int:
        """How many of the matched ``pages`` have an owner besides the index: sharing those takes nothing away."""
        return int((self._arena.owners(pages) > 1).sum()) if pages.size else 0

    def lease(self, match: PrefixMatch) -> None:
        """Keeps the match's pages from eviction until :meth:`release`, or until their new owner releases them."""
        now = self._tick()
        if match.num_pages:
            self._arena.share(match.pages)
            self._used[match.pages] = now
        self.counters["hits" if match.num_pages else "misses"] += 1
        self.counters["hit_tokens"] += match.num_pages * self._page_size

    def release(self, match: PrefixMatch) -> None:
        """Ends a lease."""
        self._arena.release(match.pages)

    def trim(self, match: PrefixMatch, num_pages: int) -> PrefixMatch:
        """The first ``num_pages`` of a leased match; the lease of the others ends."""
        if num_pages >= match.num_pages:
            return match
        self._arena.release(match.pages[num_pages:])
        self.counters["hit_tokens"] -= (match.num_pages - num_pages) * self._page_size
        return PrefixMatch(match.pages[:num_pages], match.keys, match.root)

    def insert(self, parent_key: bytes | None, key: bytes, ids: np.ndarray, page: int) -> bool:
        """Takes ``page``, which holds ``ids`` [page_size], under ``key``; the caller must own it and write it no more.

        ``parent_key`` is the key of the page before it, None for a stream's first page.  False, and nothing taken,
        when the key has a page already (the first writer wins), the page holds another entry, or the page before it
        is not indexed, so that no lookup could come by.
        """
        parent = None if parent_key is None else self._page_of.get(parent_key)
        depth = 0 if parent is None else int(self._depth[parent]) + 1
        taken = self.insert_pages([parent_key], [key], [page], np.array([depth]), np.asarray(ids)[None])
        return bool(taken.size)

    def insert_pages(
        self,
        parent_keys: Sequence[bytes | None],
        keys: Sequence[bytes],
        pages: Sequence[int],
        depths: np.ndarray,
        ids: np.ndarray,
    ) -> np.ndarray:
        """:meth:`insert` of each of ``pages`` [n] in turn, behind ``depths`` [n] others, with ``ids`` [n, page_size].

        Returns which were taken, as positions int64 [m].
        """
        page_of, key_of = self._page_of, self._key_of
        taken: list[int] = []
        parents: list[int] = []
        for i, (parent_key, key, page) in enumerate(zip(parent_keys, keys, pages, strict=True)):
            parent = NO_PAGE if parent_key is None else page_of.get(parent_key)
            if parent is not None and key not in page_of and page not in key_of:
                page_of[key] = page
                key_of[page] = key
                if key in self._watched:
                    self._arrived.add(key)
                taken.append(i)
                parents.append(parent)
        which = np.array(taken, np.int64)
        if len(taken) == len(keys) > 0:
            self._enter(np.array(pages), np.array(parents), depths, ids)
        elif taken:
            self._enter(np.array(pages)[which], np.array(parents), depths[which], ids[which])
        return which

    def _enter(self, pages: np.ndarray, parents: np.ndarray, depths: np.ndarray, ids: np.ndarray) -> None:
        """Fills in the arrays of new entries [n], each after its parent, which may be among them."""
        self._ids[pages] = ids
        self._used[pages] = self._serial[pages] = np.arange(self._clock + 1, self._clock + 1 + pages.size)
        self._clock += pages.size
        self._parent[pages] = parents
        self._parent_serial[pages] = self._serial[parents]
        self._depth[pages] = depths
        self._arena.adopt(pages)
        self.counters["insertions"] += pages.size

    def evict(self, n: int) -> int:
        """Frees up to ``n`` pages that the index alone owns, and returns how many.

        Leaves go first, the longest unused before the others, and make leaves of their parents.  An entry whose
        children are all in use counts as a leaf: they stay with their owners, out of reach until it comes back.
        """
        freed = 0
        while freed < n and (self._ranked.size or self._rank()):
            next_ones, self._ranked = self._ranked[: n - freed], self._ranked[n - freed :]
            used, self._ranked_used = self._ranked_used[: n - freed], self._ranked_used[n - freed :]
            unused_since = self._used[next_ones] == used
            if not unused_since.all():  # the others may be in use; if not, the next ranking has them
                next_ones = next_ones[unused_since]
            freed += next_ones.size
            self._forget(next_ones)
        self.counters["evictions"] += freed
        return freed

    def _rank(self) -> bool:
        """Ranks the idle pages anew; whether there are any.

        What turns idle later is in use now, so it is younger than all that is ranked here: ranking again only when
        the ranking is used up keeps the order, and an eviction costs no scan of the pool.

        Each page goes as soon as its idle descendants are gone, if it was unused for longer than they were; so it is
        ranked by the last use in its whole idle family, descendants first.
        """
        pages = self.pages()
        idle = pages[self._arena.owners(pages) == 1]
        last_use = self._used[idle]
        above, further = None, self._idle_parents(idle)
        while above is None or not np.array_equal(further, above):
            above = further
            np.maximum.at(last_use, above, last_use)  # from descendants twice as far away as before
            further = above[above]
        order = np.lexsort((-self._depth[idle], last_use))
        self._ranked = idle[order]
        self._ranked_used = self._used[self._ranked]
        return bool(idle.size)

    def _idle_parents(self, idle: np.ndarray) -> np.ndarray:
        """Where in ``idle`` [n] the parent of each page is; where none is, its own place."""
        places = np.arange(idle.size)
        self._place.fill(-1)
        self._place[idle] = places
        parents = self._parent[idle]
        above = self._place[parents]
        is_linked = (above >= 0) & (self._serial[parents] == self._parent_serial[idle])
        return np.where(is_linked, above, places)

    def _forget(self, pages: np.ndarray) -> None:
        """Drops idle entries and frees their pages."""
        page_of, key_of = self._page_of, self._key_of
        for page in pages.tolist():
            del page_of[key_of.pop(page)]
        self._serial[pages] = 0
        self._arena.free_idle(pages)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
