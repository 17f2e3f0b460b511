"""A step's rows as kernels read them on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mstar.engine.resources.kv.step_rows import PlannedRows
from mstar.engine.resources.static import StaticView, StepBuffer
from mstar.engine.resources.step import SlotLease


@dataclass(frozen=True, eq=False)
class DeviceView:
    """``B`` rows of one plan label.  Under a lease the tensors lie at addresses of the slot and ``B``.

    Row ``b`` has the new tokens ``q_indptr[b] : q_indptr[b + 1]`` and reads ``kv_lens[b]`` tokens of stream
    ``streams[b]``, its new ones included, whose pages are ``table[streams[b]]`` in order.  ``advances``: by how much
    the step moves each stream's length on, where its forward does that.
    """

    table: torch.Tensor  # int32 [streams, pages of the longest]
    streams: torch.Tensor  # int32 [B]
    kv_lens: torch.Tensor  # int32 [B]
    advances: torch.Tensor  # int32 [B]
    q_indptr: torch.Tensor  # int32 [B + 1]


class ViewBuffers:
    """The static views of one label, each sent in one copy."""

    def __init__(self, table: torch.Tensor, device: torch.device, num_slots: int) -> None:
        self._table = table
        self._buffer = StepBuffer(torch.int32, device, num_slots)
        self._views: dict[tuple[int, int], tuple[StaticView, DeviceView]] = {}

    def reserve(self, rows: int) -> None:
        """Room for steps of ``rows``; may move the buffers, so only before any capture."""
        self._buffer.reserve(4 * _aligned(rows) + 1)
        self._views.clear()

    def send(
        self, rows: PlannedRows, kv_lens: np.ndarray | None, advances: np.ndarray | None, lease: SlotLease | None
    ) -> DeviceView:
        """A view of ``rows``.

        Args:
            kv_lens: int64 [B]; None: the forward will write them.
            advances: int32 [B]; None: the forward moves nothing.
        """
        count = rows.streams.size
        if lease is None:
            host = np.empty(3 * _aligned(count) + count + 1, np.int32)
            _fill(host, rows, kv_lens, advances)
            return self._view(self._buffer.put(host, None), count)
        key = lease.slot, count
        kept = self._views.get(key)
        if kept is None:
            static = self._buffer.static(3 * _aligned(count) + count + 1, lease)
            kept = self._views[key] = static, self._view(static.device, count)
        static, view = kept
        _fill(static.host, rows, kv_lens, advances)
        static.sent()
        return view

    def _view(self, packed: torch.Tensor, count: int) -> DeviceView:
        stride = _aligned(count)
        streams, kv_lens, advances = (packed[at : at + count] for at in (0, stride, 2 * stride))
        return DeviceView(self._table, streams, kv_lens, advances, packed[3 * stride :])


def _fill(host: np.ndarray, rows: PlannedRows, kv_lens: np.ndarray | None, advances: np.ndarray | None) -> None:
    """Streams, lengths, advances and indptr laid end to end."""
    count = rows.streams.size
    stride = _aligned(count)
    host[:count] = rows.streams
    host[stride : stride + count] = 0 if kv_lens is None else kv_lens
    host[2 * stride : 2 * stride + count] = 0 if advances is None else advances
    host[3 * stride :] = rows.qo_indptr


def _aligned(count: int) -> int:
    """``count`` int32 filled up to 16 bytes: kernels of one alignment serve every batch size."""
    return count + -count % 4
