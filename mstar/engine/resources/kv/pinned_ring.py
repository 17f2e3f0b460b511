"""Host buffers that index arrays are copied to the device from."""

from __future__ import annotations

import numpy as np
import torch

START_ELEMENTS = 4096


class PinnedRing:
    """int32 buffers used in turn, page-locked where the device is a CUDA device, so that copies are asynchronous.

    Between two :meth:`begin` calls at most ``depth`` arrays may be taken.  A buffer is written again only after the
    copies from it are done: the next :meth:`begin` records an event, on the stream that was current when it was
    taken, and its next :meth:`take` waits for that event.  Without CUDA copies are done when they return.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event | None] = []
        self._taken: list[int] = []  # since the last begin
        self._stream: torch.cuda.Stream | None = None
        self._next = 0
        self.takes = 0
        self.ensure_depth(depth)

    @property
    def depth(self) -> int:
        return len(self._buffers)

    def ensure_depth(self, depth: int) -> None:
        """Adds buffers until there are ``depth``."""
        while len(self._buffers) < depth:
            self._buffers.append(self._buffer(START_ELEMENTS))
            self._events.append(None)

    def begin(self) -> None:
        """A plan begins: the copies of the one before have been issued."""
        if not self._is_cuda:
            return
        if self._taken:
            event = torch.cuda.Event()
            event.record(self._stream)
            for index in self._taken:
                self._events[index] = event
            self._taken.clear()
        self._stream = torch.cuda.current_stream(self._device)

    def take(self, values: np.ndarray) -> np.ndarray:
        """``values`` [n] in the next buffer: an int32 view, good until ``depth`` more arrays were taken.

        A longer buffer replaces one that is too short; views of the old one stay as they are.
        """
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        event, self._events[index] = self._events[index], None
        if event is not None:
            event.synchronize()
        buffer = self._buffers[index]
        if buffer.numel() < values.size:
            buffer = self._buffers[index] = self._buffer(max(values.size, 2 * buffer.numel()))
        if self._is_cuda:
            self._taken.append(index)
        self.takes += 1
        view = buffer.numpy()[: values.size]
        view[...] = values
        return view

    def _buffer(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.int32, pin_memory=self._is_cuda)
