"""Index arrays of one label and slot on the device, where FlashInfer's kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from mstar.engine.resources.kv.plan import PagedIndptrs


class DeviceRows(NamedTuple):
    """int32 on the device, as :class:`PagedIndptrs` has them on the host."""

    qo_indptr: torch.Tensor  # [B + 1]
    kv_indptr: torch.Tensor  # [B + 1]
    pages: torch.Tensor  # [pages of all rows]
    last_page_len: torch.Tensor  # [B]


class RowBuffers:
    """Room for the arrays of one label's steps on one slot, at addresses that only :meth:`reserve` and a step larger
    than what was reserved move.

    An array that is there already, from the slot's last step, is not sent again.  What is sent is copied from where
    it lies: page-locked memory lets the host go on, other memory may hold it up until the device gets there.
    """

    def __init__(self, device: torch.device) -> None:
        self._arrays = tuple(_SentArray(device) for _ in DeviceRows._fields)

    def reserve(self, num_rows: int, num_pages: int) -> None:
        """Room for ``num_rows`` rows that list ``num_pages`` pages in all."""
        for array, length in zip(self._arrays, (num_rows + 1, num_rows + 1, num_pages, num_rows), strict=True):
            array.reserve(length)

    def send(self, qo_indptr: np.ndarray, arrays: PagedIndptrs) -> DeviceRows:
        """The step's arrays on the device, in order with the current stream; ``qo_indptr`` int32 [B + 1]."""
        host = (qo_indptr, arrays.paged_kv_indptr, arrays.paged_kv_indices, arrays.paged_kv_last_page_len)
        return DeviceRows(*(array.put(values) for array, values in zip(self._arrays, host, strict=True)))


class _SentArray:
    """An int32 array on the device, and what of it the host knows to be there."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, dtype=torch.int32, device=device)
        self._known = np.empty(0, np.int32)

    def reserve(self, length: int) -> None:
        if length > self._known.size:
            self._device = self._device.new_zeros(length)
            self._known = np.zeros(length, np.int32)

    def put(self, values: np.ndarray) -> torch.Tensor:
        """``values`` [n] int32 as the first elements; the others keep what they hold."""
        length = values.size
        if length > self._known.size:
            self.reserve(max(length, 2 * self._known.size))
        on_device, known = self._device[:length], self._known[:length]
        if not (known == values).all():
            known[...] = values
            on_device.copy_(torch.from_numpy(values), non_blocking=True)
        return on_device
