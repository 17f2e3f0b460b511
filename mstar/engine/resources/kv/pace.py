"""When the rows of an unchanged decode batch need their next pages."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mstar.engine.resources.kv.streams import Streams

_YOUTH = 2  # steps


class DecodePace:
    """Steps that store one token in each of ``streams``, distinct: it is known ahead which rows fill a page when.

    Good for as long as nothing but these steps touches any stream, which the two epochs tell.  The timetable is made
    at the third step, since many batches don't come to one.
    """

    def __init__(self, streams: np.ndarray, table: Streams, page_size: int, max_seq_len: int) -> None:
        self._batch = streams
        self._table = table
        self._page_size = page_size
        self._max_seq_len = max_seq_len
        self._seen = (table.epoch, table.page_epoch)
        self._turns: list[np.ndarray] | None = None  # by step, round and round: the streams that need a page
        self._last_turn = 0  # at which every row still has room for a token
        self._turn = 0
        self._is_served = True  # the pages of this turn are there

    def is_kept_by(self, streams: np.ndarray) -> bool:
        """Whether a step of ``streams`` comes next, as foreseen."""
        table = self._table
        return streams is self._batch and self._seen == (table.epoch, table.page_epoch)

    def due(self) -> np.ndarray | None:
        """The streams that need one page each before the coming step; None where that must be looked up."""
        if self._is_served:
            return self._batch[:0]
        if self.is_young:
            return None
        if self._turns is None:
            self._make_timetable()
        if self._turns is None or self._turn > self._last_turn:
            return None
        return self._turns[self._turn % self._page_size]

    @property
    def is_young(self) -> bool:
        """Whether there is no timetable, for it is too early to make one."""
        return self._turns is None and self._turn < _YOUTH

    def served(self) -> None:
        """The pages that were due are there."""
        self._is_served = True
        self._seen = (self._table.epoch, self._table.page_epoch)

    def stepped(self, streams: np.ndarray, epoch_before: int) -> None:
        """A step of ``streams``, one token each, was committed."""
        if streams is self._batch and self._seen == (epoch_before, self._table.page_epoch):
            self._seen = (self._table.epoch, self._table.page_epoch)
            self._turn += 1
            self._is_served = False

    def _make_timetable(self) -> None:
        stored = self._table.stored_len[self._batch]
        room = self._table.num_pages[self._batch] * self._page_size - stored
        if room.size and room.min() >= 0 and room.max() < self._page_size:  # nobody has pages in reserve
            order = np.argsort(room, kind="stable")
            by_turn = self._batch[order]
            starts = np.searchsorted(room[order], np.arange(self._page_size + 1)).tolist()
            self._turns = [by_turn[start:end] for start, end in pairwise(starts)]
            self._last_turn = self._max_seq_len - int(stored.max()) - 1
            self._turn = 0
