"""Moving the streams of waiting requests to the host pool and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mstar.engine.resources.kv.offload import OffloadPool
from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.streams import Streams


class Offloading:
    """Which streams are in the pool, by stream; all labels of a request move together.

    ``_in_flight`` bool [streams]: a step of the stream was admitted and has neither committed nor been given up.  It
    is written under the pool's lock, so that no stream is moved from under a step.
    """

    def __init__(
        self,
        pool: OffloadPool,
        streams: Streams,
        arena: PageArena,
        take_pages: Callable[[int], np.ndarray | None],
    ) -> None:
        self.pool = pool
        self._streams = streams
        self._arena = arena
        self._take_pages = take_pages
        self._in_flight = np.zeros(0, bool)
        self._stored_len: dict[int, int] = {}  # of offloaded streams

    def first_offloaded(self, streams: np.ndarray) -> int | None:
        """Position of the first of ``streams`` [n] that is in the pool."""
        if not self._stored_len:
            return None
        return next((i for i, stream in enumerate(streams.tolist()) if stream in self._stored_len), None)

    def begin_step(self, streams: np.ndarray) -> None:
        with self.pool.lock:
            missing = self._streams.num_pages.size - self._in_flight.size
            if missing:
                self._in_flight = np.concatenate([self._in_flight, np.zeros(missing, bool)])
            self._in_flight[streams] = True

    def end_step(self, streams: np.ndarray) -> None:
        with self.pool.lock:
            self._in_flight[streams[streams < self._in_flight.size]] = False

    def is_offloaded(self, row: int) -> bool:
        return any(stream in self._stored_len for stream in self._of_row(row))

    def offload(self, row: int) -> bool:
        """Moves a row's streams out; False, and no effect, while a step of it is in flight or without room, and no
        effect either when a copy raises."""
        with self.pool.lock:
            moving = [stream for stream in self._of_row(row) if self._streams.num_pages[stream]]
            is_moved = False
            try:
                is_moved = bool(moving) and all(map(self._claim, moving)) and all(map(self._settle, moving))
            finally:
                if not is_moved:
                    for stream in moving:
                        self.pool.drop(stream)
            if not is_moved:
                return False
            for stream in moving:
                self._stored_len[stream] = int(self._streams.stored_len[stream])
            self._streams.release(np.array(moving))
            return True

    def _claim(self, stream: int) -> bool:
        pages = self._streams.held_pages(np.array([stream]))
        return self.pool.claim(stream, pages, int(self._streams.generation[stream]), self._is_in_flight(stream))

    def _settle(self, stream: int) -> bool:
        return self.pool.settle(stream, int(self._streams.generation[stream]))

    def pages_of(self, row: int) -> int:
        """Pages that the offloaded streams of a row come back to."""
        return sum(self.pool.pages_held(stream) for stream in self._offloaded(row))

    def reload(self, row: int) -> bool:
        """Brings a row's streams back; False, and no effect, without pages for all of them.  When a copy raises, those
        that have come are back, and the others where they were."""
        with self.pool.lock:
            streams = self._offloaded(row)
            pages = self._take_pages(self.pages_of(row)) if streams else None
            if pages is None:
                return False
            try:
                for stream in streams:
                    own = pages[: self.pool.pages_held(stream)]
                    self.pool.reload(stream, own)
                    self._streams.put_in(stream, own, self._stored_len.pop(stream))
                    pages = pages[own.size :]
            finally:
                self._arena.release(pages)
            return True

    def reclaimable(self, row: int) -> int:
        """Pages that offloading the row would free: those that nobody else owns."""
        pages = self._streams.held_pages(np.array(self._of_row(row)))
        return int((self._arena.owners(pages) == 1).sum())

    def drop(self, rows: np.ndarray) -> None:
        """Forgets what the pool holds of these rows."""
        self.end_step(self._streams.of_rows(rows))
        for row in rows.tolist():
            for stream in self._of_row(row):
                if self._stored_len.pop(stream, None) is not None:
                    self.pool.drop(stream)

    def _is_in_flight(self, stream: int) -> bool:
        return stream < self._in_flight.size and bool(self._in_flight[stream])

    def _of_row(self, row: int) -> list[int]:
        return self._streams.of_rows(np.array([row])).tolist()

    def _offloaded(self, row: int) -> list[int]:
        return [stream for stream in self._of_row(row) if stream in self._stored_len]
