"""Pages for the tokens of a step: from the arena, and out of the prefix index what is short."""

from __future__ import annotations

import numpy as np

from mstar.engine.resources.kv.config import PagedKVConfig
from mstar.engine.resources.kv.pace import DecodePace
from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.prefix.index import PrefixIndex
from mstar.engine.resources.kv.step_rows import StepRows
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.step import AdmitOutcome, AdmitRuntimeError, AllocationFailed

_NO_PAGES = np.empty(0, np.int32)


class Growth:
    """Grows streams as their steps are admitted.  ``index`` None: there is no prefix index to evict from."""

    def __init__(self, config: PagedKVConfig, streams: Streams, arena: PageArena, index: PrefixIndex | None) -> None:
        self._config = config
        self._streams = streams
        self._arena = arena
        self._index = index
        self._pace: DecodePace | None = None

    def take(self, n: int) -> np.ndarray | None:
        """``n`` pages, after evicting exactly what is short; None, and nothing evicted, when that is not enough."""
        short = n - self._arena.num_free
        if short > 0 and self._index is not None and n <= self._arena.num_available:
            self._index.evict(short)
        return self._arena.try_allocate(n)

    def keep_up(self, rows: StepRows) -> AdmitOutcome | None:
        """Gives every real stream the pages of its new tokens; or none, and says why."""
        pace = self._pace
        is_kept = rows.is_decode and pace is not None and pace.is_kept_by(rows.streams)
        if is_kept and pace is not None:
            due = pace.due()
            if due is not None and self._serve(due):
                pace.served()
                return None
        grown = self.grow(rows, 0)
        if isinstance(grown, AdmitOutcome):
            return grown
        if is_kept and pace is not None and pace.is_young:
            pace.served()
        elif rows.is_decode:
            self._pace = DecodePace(rows.streams, self._streams, self._config.page_size, self._config.max_seq_len)
        return None

    def committed(self, rows: StepRows, epoch_before: int) -> None:
        """A step of ``rows`` has moved the streams' epoch from ``epoch_before``."""
        if rows.is_decode and self._pace is not None:
            self._pace.stepped(rows.streams, epoch_before)

    def grow(self, rows: StepRows, extra: int) -> np.ndarray | AdmitOutcome:
        """Gives every real stream the pages of its new tokens, and hands out ``extra`` more; or nothing of it."""
        page_size, longest, streams = self._config.page_size, self._config.max_seq_len, rows.streams
        lengths = self._streams.stored_len[streams] + rows.spans
        held = self._streams.num_pages[streams]
        growing = (lengths > np.minimum(held * page_size, longest)).nonzero()[0]
        if not growing.size and not extra:
            return _NO_PAGES
        too_long = np.flatnonzero(lengths > longest)
        if too_long.size:
            i = int(too_long[0])
            message = f"the stream would hold {int(lengths[i])} tokens, max_seq_len is {longest}"
            return AdmitOutcome(ok=False, reason=AdmitRuntimeError(message, rows.owner_of(i)[0]))
        need = -(-lengths[growing] // page_size) - held[growing]
        total = int(need.sum())
        pages = self.take(total + extra)
        if pages is None:
            fitting = int(np.searchsorted(np.cumsum(need), self._arena.num_available, side="right"))
            short = int(growing[fitting]) if fitting < growing.size else streams.size - 1
            return self.refused(total + extra, *rows.owner_of(short))
        self._streams.append(streams[growing], need, pages[:total])
        return pages[total:]

    def refused(self, need: int, request_id: int, label: str) -> AdmitOutcome:
        """The answer to a step that needs more pages than there are."""
        message = f"the step needs {need} KV pages, {self._arena.num_available} are free"
        return AdmitOutcome(
            ok=False, reason=AllocationFailed(message, need - self._arena.num_available, label, request_id)
        )

    def _serve(self, due: np.ndarray) -> bool:
        """One page for each of these streams; False, and none, without room."""
        if due.size:
            pages = self.take(due.size)
            if pages is None:
                return False
            self._streams.append_one(due, pages)
        return True
