"""State of streams on the device that captured steps read and move on by themselves, and what the host knows of it."""

from __future__ import annotations

import numpy as np
import torch

_RING = 8  # writes that may be on their way to the device
_FEWEST_ELEMENTS = 512  # room of one write
_UNKNOWN = np.iinfo(np.int64).min


class _Packet:
    """Room for ``capacity`` elements, their indices first: page-locked on the host, and on the device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.staging = torch.empty(12 * capacity, dtype=torch.uint8, pin_memory=True)
        self.received = torch.empty(12 * capacity, dtype=torch.uint8, device=device)
        host = self.staging.numpy()
        self.index, self.values = host[: 8 * capacity].view(np.int64), host[8 * capacity :].view(np.int32)
        self.device_index = self.received[: 8 * capacity].view(torch.int64)
        self.device_values = self.received[8 * capacity :].view(torch.int32)
        self.is_sent = torch.cuda.Event()


class DeviceWrites:
    """Single elements of int32 arrays, written in the order of the current stream, the same for all writes.

    Host values pass through page-locked packets of its own, used in turn and not before the copy from them is done, so
    that no slot has to be free for a write.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._packets: list[_Packet] = []
        self._next = 0
        self.count = 0  # writes so far

    def write(self, target: torch.Tensor, index: np.ndarray, values: np.ndarray) -> None:
        """``target[index] = values`` of an int32 array, contiguous and seen flat; both [n], indices distinct."""
        self.count += 1
        target = target.view(-1)
        if self._device.type != "cuda":
            target.numpy()[index] = values
            return
        size = index.size
        packet = self._free_packet(size)
        packet.index[:size] = index
        packet.values[:size] = values
        packet.received.copy_(packet.staging, non_blocking=True)
        packet.is_sent.record()
        target.index_copy_(0, packet.device_index[:size], packet.device_values[:size])

    def _free_packet(self, size: int) -> _Packet:
        at, self._next = self._next, (self._next + 1) % _RING
        if at == len(self._packets):
            self._packets.append(_Packet(max(size, _FEWEST_ELEMENTS), self._device))
        packet = self._packets[at]
        packet.is_sent.synchronize()  # done where nothing was sent yet
        if packet.capacity < size:
            packet = self._packets[at] = _Packet(2 * size, self._device)
        return packet


class DeviceCounters:
    """One number per stream: ``values`` int32 [size] on the device, which stays where it is.

    Captured steps read and move them; the host keeps numbers of its own, which count, and sends those that the device
    does not have.  ``epoch`` of the callers tells states of the host's numbers apart.
    """

    def __init__(self, size: int, device: torch.device, writes: DeviceWrites) -> None:
        self.values = torch.zeros(size, dtype=torch.int32, device=device)
        self._known = np.zeros(size, np.int64)  # what ``values`` hold once all that was submitted has run
        self._writes = writes
        self._streams: np.ndarray | None = None  # all of these are known to be right
        self._epoch = -1

    def bring(self, streams: np.ndarray, wanted: np.ndarray, epoch: int) -> None:
        """Makes ``values[streams]`` what ``wanted`` int64 [streams of the host] says at ``epoch``; ``streams`` int64
        [n] distinct, never changed in place."""
        if streams is self._streams and epoch == self._epoch:
            return
        self.put(streams, wanted[streams])
        self._streams, self._epoch = streams, epoch

    def put(self, streams: np.ndarray, values: np.ndarray) -> None:
        """``values[streams]`` on the device become ``values`` int64 [n]."""
        stale = (self._known[streams] != values).nonzero()[0]
        if stale.size:
            if stale.size < streams.size:
                streams, values = streams[stale], values[stale]
            self._streams = None
            self._known[streams] = _UNKNOWN  # should the write fail
            self._writes.write(self.values, streams, values)
            self._known[streams] = values

    def moved(self, streams: np.ndarray | slice, by: np.ndarray, before: int, after: int) -> None:
        """A submitted step adds ``by`` to the counters of distinct ``streams``, as the host has done to its own, whose
        epoch went from ``before`` to ``after``."""
        self._known[streams] += by
        if self._epoch == before:
            self._epoch = after

    def forget(self, streams: np.ndarray) -> None:
        """It is not known what these counters hold."""
        self._known[streams] = _UNKNOWN
        self._streams = None
