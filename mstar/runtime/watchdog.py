"""Threads that say the engine process lives, and end it when a step never does."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from mstar.runtime import exit_codes
from mstar.runtime.board import Board
from mstar.runtime.processes import children_seconds

log = logging.getLogger(__name__)

BEAT_INTERVAL_S = 0.2
SLOWEST_FACTOR = 4.0
WORKING_SHARE = 0.1  # of one core, below which nobody works
MOST_LIMITS = 20


class Watchdog:
    """Beats on the board, and watches what the engine's thread does between :meth:`begins` and :meth:`ends`.

    That may take ``limit_s``, or 4 times the longest so far if that is more; and as long again while ``worked_s``, CPU
    seconds, shows that it is at work and not waiting, up to 20 times.  What takes longer hangs: all stacks are written
    to the log and the process ends at once, so that its clients hear of it.
    """

    def __init__(self, board: Board, limit_s: float, worked_s: Callable[[], float] = children_seconds) -> None:
        """``worked_s`` is asked only once the limit is reached.  That of a GPU's engine leaves out its own process,
        whose threads spin while they wait for the device, but not the compilers that it starts."""
        self._board = board
        self._limit_s = limit_s
        self._worked_s = worked_s
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

    def begins(self) -> None:
        self._began = time.monotonic()

    def ends(self) -> None:
        began, self._began = self._began, None
        if began is not None:
            self._longest = max(self._longest, time.monotonic() - began)

    @property
    def limit_s(self) -> float:
        """How long what is in progress may take."""
        return max(self._limit_s, SLOWEST_FACTOR * self._longest)

    def _run(self) -> None:
        watched: float | None = None  # when that began which is in progress
        looked, due = 0.0, 0.0  # when it was last seen what was worked, 0 not yet, and when that is seen next
        worked = 0.0
        while not self._stopped.wait(BEAT_INTERVAL_S):
            self._board.beat()
            began, now = self._began, time.monotonic()
            if began is None or began != watched:
                watched, looked = began, 0.0
            elif not looked:
                if now - began > self.limit_s / 2:
                    looked, due, worked = now, began + self.limit_s, self._worked_s()
            elif now > due:
                before, worked = worked, self._worked_s()
                if worked - before < WORKING_SHARE * (now - looked) or now - began > MOST_LIMITS * self.limit_s:
                    self._end(now - began)
                log.warning("a step has not ended for %.0f s, but is at work", now - began)
                looked, due = now, now + self.limit_s

    def _end(self, seconds: float) -> None:
        log.critical("a step has not ended for %.0f s: the engine ends itself", seconds)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(exit_codes.STALLED)
