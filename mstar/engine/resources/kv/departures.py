"""Requests that have left: their streams are emptied together, as soon as somebody looks."""

from __future__ import annotations

import threading

import numpy as np

from mstar.engine.resources.kv.admission import AdmissionGate
from mstar.engine.resources.kv.prefix.sharing import PrefixSharing
from mstar.engine.resources.kv.streams import Streams


class Departures:
    """Master rows whose requests are gone and whose streams still hold what they held.

    Many requests leave after one step, and emptying their streams costs the same few array operations as emptying two;
    one that leaves alone is emptied by plain numbers, for a fraction of these.  Whatever reads or changes streams,
    pages or reservations calls :meth:`settle` first, be it on the step's thread or on the one that plans ahead.
    """

    def __init__(self, streams: Streams, gate: AdmissionGate, sharing: PrefixSharing | None) -> None:
        self._streams = streams
        self._gate = gate
        self._sharing = sharing
        self._rows: list[int] = []
        self._lock = threading.Lock()

    def add(self, row: int) -> None:
        """The request on master row ``row`` has left; what it has committed may be shared from now on."""
        self._rows.append(row)

    def settle(self) -> None:
        """Empties the streams of all who left, and takes their reservations back."""
        if not self._rows:
            return
        with self._lock:
            if self._rows:
                if len(self._rows) == 1:
                    self._settle_one(self._rows[0])
                else:
                    self._settle_all(np.array(self._rows))
                self._rows.clear()  # last: until then others wait at the lock

    def _settle_one(self, row: int) -> None:
        if self._sharing is not None:
            self._sharing.end_one(row)
        self._streams.release_row(row)
        self._gate.forget(row)

    def _settle_all(self, rows: np.ndarray) -> None:
        if self._sharing is not None:
            self._sharing.end(rows)
        self._streams.release(self._streams.of_rows(rows))
        self._gate.forget(rows)
