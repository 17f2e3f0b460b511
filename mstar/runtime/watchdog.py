"""Threads that say the engine process lives, and end it when a step never does."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time

from mstar.runtime.board import Board

log = logging.getLogger(__name__)

BEAT_INTERVAL_S = 0.2
STALLED_EXIT_CODE = 70
SLOWEST_FACTOR = 20.0


class Watchdog:
    """Beats on the board, and watches the steps between :meth:`step_begins` and :meth:`step_ends`.

    A step may take ``limit_s``, or 20 times the longest so far if that is more.  One that takes longer hangs: all
    stacks are written to the log and the process ends at once, so that its clients hear of it.
    """

    def __init__(self, board: Board, limit_s: float) -> None:
        self._board = board
        self._limit_s = limit_s
        self._longest = 0.0
        self._began: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mstar-watchdog", daemon=True)

    def start(self) -> None:
        self._board.beat()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def step_begins(self) -> None:
        self._began = time.monotonic()

    def step_ends(self) -> None:
        began, self._began = self._began, None
        if began is not None:
            self._longest = max(self._longest, time.monotonic() - began)

    @property
    def limit_s(self) -> float:
        """How long the step in progress may take."""
        return max(self._limit_s, SLOWEST_FACTOR * self._longest)

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_INTERVAL_S):
            self._board.beat()
            began = self._began
            if began is not None and time.monotonic() - began > self.limit_s:
                log.critical("a step has not ended for %.0f s: the engine ends itself", self.limit_s)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(STALLED_EXIT_CODE)
