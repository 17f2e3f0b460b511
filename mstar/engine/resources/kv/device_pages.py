"""The page table on the device."""

from __future__ import annotations

import numpy as np
import torch

from mstar.engine.resources.device_state import DeviceWrites
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.ragged import ragged_arange


class DevicePages:
    """``table`` int32 [size, width], which stays where it is; columns behind a stream's pages hold what they held.

    Pages are sent once, as streams that a step reads come to hold them.
    """

    def __init__(self, streams: Streams, size: int, device: torch.device, writes: DeviceWrites) -> None:
        self.table = torch.zeros(size, streams.page_table.shape[1], dtype=torch.int32, device=device)  # the sink page
        self._host = streams
        self._writes = writes
        self._sent = np.zeros(size, np.int64)  # pages of each stream that the device has
        self._rewrites = np.zeros(size, np.int64)  # of the stream when they were sent
        self._streams: np.ndarray | None = None  # all of these are up to date
        self._epochs = (-1, -1)

    def bring(self, streams: np.ndarray) -> None:
        """Sends the pages of ``streams`` int64 [n] that the device does not have; never changed in place."""
        host = self._host
        epochs = host.page_epoch, host.rewrite_epoch
        if streams is self._streams and epochs == self._epochs:
            return
        held = host.num_pages[streams]
        if streams is not self._streams or epochs[1] != self._epochs[1]:
            rewrites = host.rewrites[streams]
            self._sent[streams[rewrites != self._rewrites[streams]]] = 0
            self._rewrites[streams] = rewrites
        first = self._sent[streams]
        growing = (held != first).nonzero()[0]
        if growing.size:
            self._send(streams[growing], first[growing], held[growing])
        self._streams, self._epochs = streams, epochs

    def _send(self, streams: np.ndarray, first: np.ndarray, held: np.ndarray) -> None:
        counts = held - first
        index = streams * self.table.shape[1] + first
        if counts.max() > 1:
            index = index.repeat(counts) + ragged_arange(counts)
        self._writes.write(self.table, index, self._host.page_table.reshape(-1).take(index))
        self._sent[streams] = held
