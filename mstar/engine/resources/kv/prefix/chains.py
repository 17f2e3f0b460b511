"""Key chains of live streams: what each stream's pages hold, so that they can be indexed when they are full."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from mstar.engine.resources.kv.prefix.coming import ComingPages
from mstar.engine.resources.kv.prefix.index import PrefixIndex, PrefixMatch
from mstar.engine.resources.kv.prefix.keys import PrefixItem, keys_of_raw, next_keys
from mstar.engine.resources.ragged import ragged_arange

MAX_UNREPORTED = 65  # tokens a stream may have stored before they are told: as many steps may be in flight


class PrefixChains:
    """For each stream the keys of its full pages: of its prompt, then of the tokens it was given since.

    Only streams of label "main" have chains, so a stream here is a master row.  Host state by stream: ``_told`` tokens
    whose ids are in ``_ids``, ``_known`` those of them that its keys take into account, ``_indexed`` pages already
    offered, ``_prompt`` full pages of its prompt, ``_keys``.  A page behind the longest stream takes the ids that
    belong to no chain.  Steps are only noted, and told together as soon as somebody looks: an array operation for many
    of them costs little more than for one.  ``coming``: pages of prompts that were not offered yet.

    Keys are made once in ``lazy_steps`` steps, of all streams together.  So a chain is never ahead of one that is
    extended at every step, and fewer than ``lazy_steps`` steps behind it.
    """

    def __init__(
        self, index: PrefixIndex, page_size: int, num_streams: int, max_pages: int, lazy_steps: int = 16
    ) -> None:
        self.coming = ComingPages()
        self._index = index
        self._page_size = page_size
        self._chain_lazy_steps = lazy_steps
        self._longest = max_pages * page_size
        self._is_live = np.zeros(num_streams, bool)
        self._num_live = 0
        self._told = np.full(num_streams, self._longest, np.int64)
        self._known = self._told.copy()
        self._indexed = np.zeros(num_streams, np.int64)
        self._prompt = np.zeros(num_streams, np.int64)
        self._pages = np.zeros((num_streams, max_pages + 1, page_size), "<i4")  # resident where written
        self._ids = self._pages.reshape(num_streams, -1)
        self._keys: dict[int, list[bytes]] = {}
        self._root: dict[int, bytes] = {}
        self._items: dict[int, list[PrefixItem]] = {}  # those that reach into the page behind the prompt's full ones
        self._num_items = 0  # of all streams
        self._lazy = 0  # steps since the last flush
        self._waiting: list[tuple[bytes, np.ndarray]] = []  # streams and tokens of steps that are not told yet

    @property
    def backlog_steps(self) -> int:
        """Steps whose tokens wait to be taken into account."""
        self._tell()
        return int((self._told - self._known).max(initial=0))

    def is_live(self, stream: int) -> bool:
        """Whether the stream has a chain."""
        return bool(self._is_live[stream])

    def keys_of(self, stream: int) -> list[bytes]:
        """Keys of the stream's full pages, as far as its tokens were taken into account."""
        return self._keys[stream]

    def in_prompt(self, streams: np.ndarray) -> np.ndarray:
        """Which of ``streams`` [n] have full pages of their prompts that were not offered yet, bool [n]."""
        return self._indexed[streams] < self._prompt[streams]

    def begin(self, stream: int, ids: np.ndarray, match: PrefixMatch, items: Sequence[PrefixItem] = ()) -> None:
        """Starts the chain of a stream whose prompt is ``ids`` [n] with these ``items``.

        ``match`` is the prompt's, as far as the stream uses it: its pages are the stream's first and need no index.
        """
        self.end(stream)
        self._ids[stream, : len(ids)] = ids
        self._told[stream] = self._known[stream] = len(ids)
        self._indexed[stream] = match.num_pages
        self._prompt[stream] = len(match.keys)
        self._keys[stream] = list(match.keys)
        self._root[stream] = match.root
        self.coming.begin(stream, match.keys[match.num_pages :])
        reached = len(match.keys) * self._page_size
        self._items[stream] = [item for item in items if item.start + item.length > reached]
        self._num_items += len(self._items[stream])
        self._is_live[stream] = True
        self._num_live += 1

    def end(self, stream: int) -> None:
        """Forgets a stream's chain, with the tokens of it that still wait.  Streams without one are no error."""
        if self._waiting:
            self._tell()
        if self._is_live[stream]:
            self._is_live[stream] = False
            self._prompt[stream] = 0
            self._num_live -= 1
            self._told[stream] = self._known[stream] = self._longest
            self._num_items -= len(self._items[stream])
            if len(self.coming):
                self.coming.end(stream, self._keys[stream][self._indexed[stream] :])
            del self._keys[stream], self._root[stream], self._items[stream]

    def extend(self, streams: np.ndarray, tokens: np.ndarray) -> bool:
        """One step's kept tokens int64 [n], one for each of ``streams`` [n], distinct; those without a chain are
        skipped.  Whether the backlog was flushed."""
        if not self._num_live:
            return False
        self._waiting.append((streams.tobytes(), tokens.copy()))
        self._lazy += 1
        if self._lazy < self._chain_lazy_steps:
            return False
        self.flush_chain_backlog()
        return True

    def _tell(self) -> None:
        """Writes down the tokens of the steps noted so far; steps in a row of the same streams at once."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for raw, group in groupby(waiting, key=itemgetter(0)):
            streams, steps = np.frombuffer(raw, np.int64), [tokens for _, tokens in group]
            told = self._told[streams]
            if len(steps) == 1:  # batches that change all the time
                self._ids[streams, told] = steps[0]
            else:
                at = np.minimum(told[:, None] + np.arange(len(steps)), self._longest)
                self._ids[streams[:, None], at] = np.array(steps).T
            self._told[streams] = np.minimum(told + len(steps), self._longest)

    def flush_chain_backlog(self) -> None:
        """Takes all waiting tokens into account.  Idempotent."""
        self._lazy = 0
        self._tell()
        self.flush((self._told != self._known).nonzero()[0])

    def flush(self, streams: np.ndarray | int) -> None:
        """Takes the waiting tokens of ``streams`` [n] into account."""
        self._tell()
        streams, size = np.atleast_1d(streams), self._page_size
        told = self._told[streams]
        first = self._known[streams] // size
        counts = told // size - first
        self._known[streams] = told
        is_filled = counts > 0
        if is_filled.any():
            self._make_keys(streams[is_filled], first[is_filled], counts[is_filled])

    def committed(self, streams: np.ndarray, stored_len: np.ndarray, page_table: np.ndarray) -> int:
        """Offers the full pages of ``streams`` [n] to the index, as far as they are both committed and known.

        ``stored_len`` int64 [n] tokens committed; ``page_table`` int32 [at least num_streams, pages].  A stream that
        stored more tokens than it was given, beyond those of steps in flight, has lost count: its chain ends.

        Returns how many pages the index took.
        """
        is_live = self._is_live[streams]
        is_lost = self._are_lost(streams, stored_len) & is_live
        if self._waiting and is_lost.any():
            self._tell()
            is_lost = self._are_lost(streams, stored_len) & is_live
        if is_lost.any():
            for stream in streams[is_lost].tolist():
                self.end(stream)
            is_live &= ~is_lost
        count = np.minimum(stored_len, self._known[streams]) // self._page_size - self._indexed[streams]
        has_new = (count > 0) & is_live
        return self._offer(streams[has_new], count[has_new], page_table) if has_new.any() else 0

    def _are_lost(self, streams: np.ndarray, stored_len: np.ndarray) -> np.ndarray:
        return stored_len > self._told[streams] + MAX_UNREPORTED

    def complete(self, stream: int, stored_len: int, page_table: np.ndarray) -> None:
        """:meth:`flush`, :meth:`committed` and :meth:`end` of one stream alone, by plain numbers; ``page_table`` int32
        [pages] is its own."""
        self._tell()
        if not self._is_live[stream]:
            return
        told, size, keys = self._told.item(stream), self._page_size, self._keys[stream]
        missing = told // size - len(keys)
        if stored_len <= told + MAX_UNREPORTED:
            if missing > 0:
                self._extend_keys(stream, self._pages[stream, len(keys) : len(keys) + missing].tobytes(), missing)
            first, end = self._indexed.item(stream), min(stored_len, told) // size
            if end > first:
                self._indexed[stream] = end
                offered = keys[first:end]
                if len(self.coming):
                    self.coming.offered(offered)
                parents = [keys[first - 1] if first else None, *offered[:-1]]
                pages, columns = page_table[first:end].tolist(), np.arange(first, end)
                self._index.insert_pages(parents, offered, pages, columns, self._pages[stream, first:end])
        self.end(stream)

    def _offer(self, streams: np.ndarray, counts: np.ndarray, page_table: np.ndarray) -> int:
        """Offers the next ``counts`` [n] pages of ``streams`` [n] to the index; returns how many it took."""
        firsts = self._indexed[streams]
        if counts.max() == 1:
            owner, column = streams, firsts
        else:
            owner, column = np.repeat(streams, counts), np.repeat(firsts, counts) + ragged_arange(counts)
        parents: list[bytes | None] = []
        offered: list[bytes] = []
        for stream, first, count in zip(streams.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            keys = self._keys[stream]
            parents.append(keys[first - 1] if first else None)
            if count > 1:
                parents += keys[first : first + count - 1]
            offered += keys[first : first + count]
        self._indexed[streams] = firsts + counts
        if len(self.coming):
            self.coming.offered(offered)
        pages = page_table[owner, column].tolist()
        return self._index.insert_pages(parents, offered, pages, column, self._pages[owner, column]).size

    def _make_keys(self, streams: np.ndarray, first: np.ndarray, counts: np.ndarray) -> None:
        """Adds the keys of ``counts`` [n] full pages from page ``first`` [n] on to ``streams`` [n]."""
        if counts.max() == 1 and not self._num_items:
            self._make_next_keys(streams, first)
            return
        size, offset = self._page_size, 0
        raw = self._pages[np.repeat(streams, counts), np.repeat(first, counts) + ragged_arange(counts)].tobytes()
        for stream, count in zip(streams.tolist(), counts.tolist(), strict=True):
            self._extend_keys(stream, raw, count, offset)
            offset += 4 * size * count

    def _extend_keys(self, stream: int, raw: bytes, count: int, offset: int = 0) -> None:
        """Adds the keys of a stream's next ``count`` pages, whose ids are ``raw`` from byte ``offset``."""
        keys, items = self._keys[stream], self._items[stream]
        if items:
            base = len(keys) * self._page_size
            items = [item._replace(start=item.start - base) for item in items]
        keys += keys_of_raw(keys[-1] if keys else self._root[stream], raw, count, items, self._page_size, offset)

    def _make_next_keys(self, streams: np.ndarray, columns: np.ndarray) -> None:
        """:meth:`_make_keys` of one page each, of streams without items: all that a flush of decode steps finds."""
        chains = [(self._keys[stream], self._root[stream]) for stream in streams.tolist()]
        prevs = [keys[-1] if keys else root for keys, root in chains]
        made = next_keys(prevs, self._pages[streams, columns].tobytes(), self._page_size)
        for (keys, _), key in zip(chains, made, strict=True):
            keys.append(key)
