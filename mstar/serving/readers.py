"""A few threads that read requests, so that the server's own thread only hands them over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Request = TypeVar("Request")

NUM_READERS = 3  # tokenising runs beside the interpreter lock, the rest of reading under it: more would wait for that


class ReaderPool(Generic[Request]):
    """Calls ``read`` for every request that was put, begun in the order in which they came.

    A long prompt's reader does not hold up the requests behind it; they may then reach the engine first.
    """

    def __init__(self, read: Callable[[Request], None], size: int = NUM_READERS) -> None:
        """``read`` must not raise: it answers whatever goes wrong."""
        self._read = read
        self._inbox: SimpleQueue[Request | None] = SimpleQueue()  # None: the end
        self._threads = [
            threading.Thread(target=self._run, name=f"mstar-reader-{index}", daemon=True) for index in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, request: Request) -> None:
        """Hand over a request; never blocks."""
        self._inbox.put(request)

    def close(self) -> None:
        """Work off what was put, then end the threads."""
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while self._read_next():  # a call, so that no local keeps the last request alive
            pass

    def _read_next(self) -> bool:
        request = self._inbox.get()
        if request is not None:
            self._read(request)
        return request is not None
