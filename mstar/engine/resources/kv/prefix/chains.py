"""Key chains of live streams: what each stream's pages hold, so that they can be indexed when they are full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mstar.engine.resources.kv.prefix.index import PrefixIndex, PrefixMatch
from mstar.engine.resources.kv.prefix.keys import PrefixItem, page_keys
from mstar.engine.resources.ragged import ragged_arange

MAX_UNREPORTED = 1  # tokens a stream may have stored before they are reported, with one step running ahead


class PrefixChains:
    """For each stream the keys of its full pages: of its prompt, then of the tokens it was given since.

    Only streams of label "main" have chains, so a stream here is a master row.  Host state by stream: ``_known``
    tokens whose ids are in ``_ids``, ``_indexed`` pages already offered, ``_keys``.

    Sampled tokens wait in a backlog of up to ``lazy_steps - 1`` steps: a step of :meth:`extend` only keeps two
    arrays, and the work per stream is done once in ``lazy_steps``.  So a chain is never ahead of one that is extended
    at every step, and fewer than ``lazy_steps`` steps behind it.
    """

    def __init__(
        self, index: PrefixIndex, page_size: int, num_streams: int, max_pages: int, lazy_steps: int = 16
    ) -> None:
        self._index = index
        self._page_size = page_size
        self._chain_lazy_steps = lazy_steps
        self._is_live = np.zeros(num_streams, bool)
        self._known = np.zeros(num_streams, np.int64)
        self._waiting = np.zeros(num_streams, np.int64)  # tokens in the backlog
        self._indexed = np.zeros(num_streams, np.int64)
        self._ids = np.zeros((num_streams, max_pages * page_size), np.int32)  # resident where written
        self._keys: dict[int, list[bytes]] = {}
        self._root: dict[int, bytes] = {}
        self._items: dict[int, list[PrefixItem]] = {}  # those that reach into the page behind the prompt's full ones
        self._backlog: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def backlog_steps(self) -> int:
        """Steps whose tokens wait to be added."""
        return len(self._backlog)

    def is_live(self, stream: int) -> bool:
        """Whether the stream has a chain."""
        return bool(self._is_live[stream])

    def keys_of(self, stream: int) -> list[bytes]:
        """Keys of the stream's full pages, as far as its tokens were added."""
        return self._keys[stream]

    def begin(self, stream: int, ids: np.ndarray, match: PrefixMatch, items: Sequence[PrefixItem] = ()) -> None:
        """Starts the chain of a stream whose prompt is ``ids`` [n] with these ``items``.

        ``match`` is the prompt's, as far as the stream uses it: its pages are the stream's first and need no index.
        """
        self.end(stream)
        self._ids[stream, : len(ids)] = ids
        self._known[stream] = len(ids)
        self._indexed[stream] = match.num_pages
        self._keys[stream] = list(match.keys)
        self._root[stream] = match.root
        self._items[stream] = [item for item in items if item.start + item.length > len(match.keys) * self._page_size]
        self._is_live[stream] = True

    def end(self, stream: int) -> None:
        """Forgets a stream's chain, with the tokens of it that still wait.  Streams without one are no error."""
        if not self._is_live[stream]:
            return
        self._is_live[stream] = False
        if self._waiting[stream]:
            self._take_waiting(stream)
        del self._keys[stream], self._root[stream], self._items[stream]

    def extend(self, streams: np.ndarray, tokens: np.ndarray) -> None:
        """One step's kept tokens int64 [n], one for each of ``streams`` [n]; those without a chain are skipped."""
        is_live = self._is_live[streams]
        if not is_live.any():
            return
        kept = (streams[is_live], tokens[is_live])  # copies: the caller may reuse its arrays
        self._waiting[kept[0]] += 1
        self._backlog.append(kept)
        if len(self._backlog) >= self._chain_lazy_steps:
            self.flush_chain_backlog()

    def flush_chain_backlog(self) -> None:
        """Adds all waiting tokens to their chains.  Idempotent."""
        if not self._backlog:
            return
        streams = np.concatenate([streams for streams, _ in self._backlog])
        tokens = np.concatenate([tokens for _, tokens in self._backlog])
        self._backlog.clear()
        self._add(streams, tokens)

    def flush(self, stream: int) -> None:
        """Adds one stream's waiting tokens to its chain."""
        if self._waiting[stream]:
            tokens = self._take_waiting(stream)
            self._add(np.full(tokens.size, stream), tokens)

    def committed(self, streams: np.ndarray, stored_len: np.ndarray, page_table: np.ndarray) -> int:
        """Offers the full pages of ``streams`` [n] to the index, as far as they are both committed and known.

        ``stored_len`` int64 [n] tokens committed; ``page_table`` int32 [at least num_streams, pages].  A stream that
        stored more tokens than it was given, beyond those of the step in flight, has lost count: its chain ends.

        Returns how many pages the index took.
        """
        is_live = self._is_live[streams]
        if not is_live.any():
            return 0
        size, known = self._page_size, self._known[streams]
        full = np.minimum(stored_len, known) // size
        is_lost = (stored_len > known + self._waiting[streams] + MAX_UNREPORTED) & is_live
        has_new = (full > self._indexed[streams]) & is_live & ~is_lost
        for stream in streams[is_lost].tolist():
            self.end(stream)
        entries: list[tuple[bytes | None, bytes, int]] = []
        ids = []
        for stream, count in zip(streams[has_new].tolist(), full[has_new].tolist(), strict=True):
            keys, first = self._keys[stream], int(self._indexed[stream])
            parents = [keys[first - 1] if first else None, *keys[first : count - 1]]
            entries += zip(parents, keys[first:count], page_table[stream, first:count].tolist(), strict=True)
            ids.append(self._ids[stream, first * size : count * size].reshape(-1, size))
            self._indexed[stream] = count
        return int(self._index.insert_pages(entries, np.concatenate(ids)).sum()) if entries else 0

    def _take_waiting(self, stream: int) -> np.ndarray:
        """The stream's tokens in the backlog, oldest first, taken out of it."""
        taken = []
        for step, (streams, tokens) in enumerate(self._backlog):
            is_other = streams != stream
            if not is_other.all():
                taken.append(tokens[~is_other])
                self._backlog[step] = (streams[is_other], tokens[is_other])
        self._waiting[stream] = 0
        return np.concatenate(taken)

    def _add(self, streams: np.ndarray, tokens: np.ndarray) -> None:
        """Writes ``tokens`` behind what their streams know, and makes the keys of the pages they fill."""
        order = np.argsort(streams, kind="stable")
        distinct, counts = np.unique(streams, return_counts=True)
        start = self._known[distinct]
        position = np.repeat(start, counts) + ragged_arange(counts)
        is_room = position < self._ids.shape[1]
        self._ids[streams[order][is_room], position[is_room]] = tokens[order][is_room]
        self._waiting[distinct] = 0
        end = np.minimum(start + counts, self._ids.shape[1])
        self._known[distinct] = end
        size = self._page_size
        is_filled = end // size > start // size
        for stream, pages in zip(distinct[is_filled].tolist(), (end[is_filled] // size).tolist(), strict=True):
            keys = self._keys[stream]
            base = len(keys) * size
            items = [item._replace(start=item.start - base) for item in self._items[stream]]
            prev = keys[-1] if keys else self._root[stream]
            keys += page_keys(prev, self._ids[stream, base : pages * size], items, size)
