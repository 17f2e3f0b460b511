"""The invariant of every step: something runs, or somebody is told why it does not."""

from __future__ import annotations

import logging

import numpy as np

from mstar.conductor.departures import Departures
from mstar.conductor.lobby import Lobby
from mstar.conductor.pools import Pools
from mstar.conductor.rows import IDLE, RowTable
from mstar.utils import knobs
from mstar.utils.errors import EngineFault, ErrorCode

log = logging.getLogger(__name__)

# Calls in a row in which nothing ran, was in flight, or was told.  A few are usual: rows are held back by halves, an
# admission is not ready.  Whoever calls a conductor rests a millisecond in between.
MOST_IDLE_CALLS = 2000
MOST_IDLE_CALLS_ASSERTED = 100
MORE_CALLS = 50  # after one request was ended, until the next is


class Progress:
    """Counts idle calls while somebody could run, and ends the newest of the lowest priority when they are too many: it
    is the conductor's defect, and one request less may get the others going again.  With MSTAR_PROGRESS_ASSERTS it
    raises instead."""

    def __init__(self, table: RowTable, lobby: Lobby, pools: Pools, departures: Departures) -> None:
        self._table = table
        self._lobby = lobby
        self._pools = pools
        self._departures = departures
        self._raises = knobs.progress_asserts()
        self._most = MOST_IDLE_CALLS_ASSERTED if self._raises else MOST_IDLE_CALLS
        self._num_idle = 0

    def was_made(self) -> None:
        """In the call that ends."""
        self._num_idle = 0

    def was_none(self) -> bool:
        """In the call that ends; whether a request was ended for it.

        Raises:
            AssertionError: with MSTAR_PROGRESS_ASSERTS, that nothing will ever happen, and how things stand.
        """
        if not (self._table.num_running or len(self._lobby.queue)):
            self._num_idle = 0  # somebody is being prepared, or nobody is there
            return False
        self._num_idle += 1
        if self._num_idle < self._most:
            return False
        state = self._state()
        if self._raises:
            raise AssertionError(f"nothing happened in {self._num_idle} calls: {state}")
        self._num_idle -= MORE_CALLS
        message = f"the engine failed: it found nothing to run for this request; {state}"
        log.critical("%s", message)
        self._end_one(message)
        return True

    def _end_one(self, message: str) -> None:
        table = self._table
        if table.num_running:
            rows = np.fromiter(table.row_of.values(), np.int64)
            order = np.lexsort((-table.request_id[rows], table.priority[rows]))
            self._departures.fail(int(rows[order[0]]), EngineFault(message))
            return
        head = self._lobby.queue.head()
        assert head is not None
        self._lobby.remove(head.request_id)
        self._departures.fail_unrun(head, ErrorCode.INTERNAL, message)

    def _state(self) -> str:
        table = self._table
        rows = np.fromiter(table.row_of.values(), np.int64, table.num_running)
        ready = table.ready_states()[rows] != IDLE
        free = self._pools.num_pages - self._pools.num_pages_used
        return (
            f"{rows.size} requests have rows, of which {np.count_nonzero(ready)} could run, "
            f"{np.count_nonzero(table.state[rows] == IDLE)} have no step to run and "
            f"{np.count_nonzero(table.is_held[rows])} are held for pages; {len(self._lobby)} wait; "
            f"{free} of {self._pools.num_pages} KV pages are free"
        )
