"""State of every token stream: one per (master row, label)."""

from __future__ import annotations

import numpy as np

from mstar.engine.resources.kv.pages import SINK_PAGE, PageArena
from mstar.engine.resources.ragged import ragged_arange
from mstar.engine.resources.step import MAIN_LABEL


class Streams:
    """Host arrays indexed by stream, which is ``label index * total_rows + master row``; "main" has index 0.

    ``stored_len`` int64 tokens stored; ``num_pages`` int64 pages held; ``page_table`` int32 [streams, pages of the
    longest stream], the sink page where none is held; ``generation`` int64, which moves whenever what a plan of the
    stream says would change other than by a reservation of more pages.  Arrays grow by ``total_rows`` per new label.

    ``epoch`` moves when any generation does, ``page_epoch`` with reservations: while they stand, so does everything.
    ``rewrites`` int64 moves when a stream's pages are no longer those it held, with more behind them; ``rewrite_epoch``
    when any does.
    """

    def __init__(self, arena: PageArena, page_size: int, max_pages: int, total_rows: int) -> None:
        self.total_rows = total_rows
        self._arena = arena
        self._page_size = page_size
        self._label_index = {MAIN_LABEL: 0}
        self.epoch = 0
        self.page_epoch = 0
        self.rewrite_epoch = 0
        self.stored_len = np.zeros(total_rows, np.int64)
        self.num_pages = np.zeros(total_rows, np.int64)
        self.generation = np.zeros(total_rows, np.int64)
        self.rewrites = np.zeros(total_rows, np.int64)
        self.page_table = np.full((total_rows, max_pages), SINK_PAGE, np.int32)

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels seen so far, by index."""
        return tuple(self._label_index)

    def of(self, label: str, rows: np.ndarray) -> np.ndarray:
        """The streams int64 [n] of ``label`` of master rows ``rows`` int64 [n]; a new label is taken in."""
        index = self._label_index.get(label)
        if index is None:
            index = self._add_label(label)
        return rows if index == 0 else rows + index * self.total_rows

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """The streams of every label of these rows."""
        if len(self._label_index) == 1:
            return rows
        offsets = np.arange(len(self._label_index)) * self.total_rows
        return (offsets[:, None] + rows).reshape(-1)

    def pages_of(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens fill."""
        return -(-tokens // self._page_size)

    def by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """For each master row, int64 [total_rows]: tokens of its longest stream, and pages of all of them."""
        if len(self._label_index) == 1:
            return self.stored_len, self.num_pages
        stored, held = (array.reshape(-1, self.total_rows) for array in (self.stored_len, self.num_pages))
        return stored.max(0), held.sum(0)

    def held_pages(self, streams: np.ndarray) -> np.ndarray:
        """The pages of ``streams`` laid end to end, int32."""
        held = self.num_pages[streams]
        return self.page_table[streams.repeat(held), ragged_arange(held)]

    def all_pages(self) -> np.ndarray:
        """The pages of every stream laid end to end, int32."""
        return self.held_pages(np.arange(self.num_pages.size))

    def append(self, streams: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> None:
        """Gives stream ``streams[i]`` its next ``counts[i]`` of ``pages``, in order."""
        if pages.size == streams.size and (counts == 1).all():
            self.append_one(streams, pages)
            return
        self.page_epoch += 1
        columns = np.repeat(self.num_pages[streams], counts) + ragged_arange(counts)
        self.page_table[streams.repeat(counts), columns] = pages
        self.num_pages[streams] += counts

    def append_one(self, streams: np.ndarray, pages: np.ndarray) -> None:
        """Gives each of ``streams`` its next page."""
        held = self.num_pages[streams]
        self.page_table[streams, held] = pages
        self.num_pages[streams] = held + 1
        self.page_epoch += 1

    def advance(self, streams: np.ndarray, spans: np.ndarray, growing: np.ndarray) -> None:
        """``streams`` [n] store ``spans`` [n] more tokens; ``growing`` are those of them whose span is not 0."""
        self.stored_len[streams] += spans
        self.generation[growing] += 1
        self.epoch += 1

    def advance_block(self, block: slice, ones: np.ndarray) -> None:
        """Each stream of ``block`` stores one more token.  ``ones``: as many, which adds faster than a number does."""
        self.stored_len[block] += ones
        self.generation[block] += ones
        self.epoch += 1

    def take_out(self, stream: int) -> np.ndarray:
        """Empties a stream and hands out the pages it held, int32, still owned."""
        pages = self.page_table[stream, : self.num_pages[stream]].copy()
        self.put_in(stream, pages[:0], 0)
        return pages

    def put_in(self, stream: int, pages: np.ndarray, stored_len: int) -> None:
        """A stream's pages and length become these; what it held is the caller's to release."""
        self.page_table[stream] = SINK_PAGE
        self.page_table[stream, : pages.size] = pages
        self.num_pages[stream] = pages.size
        self.stored_len[stream] = stored_len
        self._changed(stream)

    def release_row(self, row: int) -> None:
        """:meth:`release` of all streams of one master row."""
        for stream in range(row, self.num_pages.size, self.total_rows):
            held = self.num_pages[stream]
            if held:
                table = self.page_table[stream]
                self._arena.release(table[:held], is_distinct=True)
                table[:held] = SINK_PAGE
                self.num_pages[stream] = 0
            self.stored_len[stream] = 0
            self._changed(stream)

    def release(self, streams: np.ndarray) -> None:
        """Empties ``streams`` and releases their pages."""
        if self.num_pages[streams].any():
            self._arena.release(self.held_pages(streams), is_distinct=streams.size == 1)
            self.page_table[streams] = SINK_PAGE
            self.num_pages[streams] = 0
        self.stored_len[streams] = 0
        self._changed(streams)

    def rewind(self, streams: np.ndarray) -> None:
        """Streams back to length 0; they keep their pages."""
        self.stored_len[streams] = 0
        self._changed(streams)

    def release_behind(self, stream: int, first: int, count: int) -> None:
        """Releases the ``count`` whole pages that follow a stream's first ``first``; what is behind them moves up."""
        held = int(self.num_pages[stream])
        row = self.page_table[stream]
        self._arena.release(row[first : first + count].copy())
        row[first : held - count] = row[first + count : held].copy()
        row[held - count : held] = SINK_PAGE
        self.num_pages[stream] -= count
        self.stored_len[stream] -= count * self._page_size
        self._changed(stream)

    def check_written(self, streams: np.ndarray, spans: np.ndarray) -> None:
        """Asserts that the pages to which ``streams`` [n] are about to write ``spans`` [n] tokens have no other owner
        and are not sealed."""
        for stream, span in zip(streams.tolist(), spans.tolist(), strict=True):
            start = int(self.stored_len[stream])
            if span:
                pages = self.page_table[stream, start // self._page_size : self.pages_of(start + span)]
                assert (self._arena.owners(pages) == 1).all(), "a step writes to a page that has several owners"
                assert not self._arena.is_sealed(pages).any(), "a step writes to a sealed page"

    def _changed(self, streams: np.ndarray | int) -> None:
        self.generation[streams] += 1
        self.rewrites[streams] += 1
        self.epoch += 1
        self.rewrite_epoch += 1

    def _add_label(self, label: str) -> int:
        index = self._label_index[label] = len(self._label_index)
        more = self.total_rows
        self.stored_len, self.num_pages, self.generation, self.rewrites = (
            np.concatenate([array, np.zeros(more, np.int64)])
            for array in (self.stored_len, self.num_pages, self.generation, self.rewrites)
        )
        empty = np.full((more, self.page_table.shape[1]), SINK_PAGE, np.int32)
        self.page_table = np.concatenate([self.page_table, empty])
        return index
