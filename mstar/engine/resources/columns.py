"""Several values per row of a step, on their way to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mstar.engine.resources.step import SlotLease

_MOST_KEPT_VIEWS = 512
_ALIGNED = 64  # bytes: kernels are compiled anew for addresses that are less aligned
Columns = dict[str, torch.Tensor]  # each [rows]


class StepColumns:
    """Columns of up to ``max_rows`` rows, one behind the other.

    Under a lease they lie at addresses that depend on the slot alone, so that a captured step may read them; eager
    steps get tensors of their own.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype], device: torch.device, num_slots: int) -> None:
        self._dtypes = dict(dtypes)
        self._device = device
        self._slots = [_Block(self._dtypes, 0, device) for _ in range(num_slots)]
        self._max_rows = 0
        self._views: dict[tuple[int, int], Columns] = {}

    def reserve(self, max_rows: int) -> None:
        """Room for ``max_rows`` rows in every slot; moves the columns, so only before any capture."""
        if max_rows > self._max_rows:
            self._max_rows = max_rows
            self._slots = [_Block(self._dtypes, max_rows, self._device) for _ in self._slots]
            self._views.clear()

    def put(self, values: Mapping[str, np.ndarray], lease: SlotLease | None) -> Columns:
        """``values`` of every column, [rows] each, on the device."""
        rows = next(iter(values.values())).size
        if lease is None:
            block = _Block(self._dtypes, rows, self._device)
            block.fill(values, rows)
            return block.sent()
        key = lease.slot, rows
        block = self._slots[lease.slot]
        block.fill(values, rows)
        columns = block.sent()
        if key not in self._views:
            if len(self._views) >= _MOST_KEPT_VIEWS:
                self._views.clear()
            self._views[key] = {name: column[:rows] for name, column in columns.items()}
        return self._views[key]


class _Block:
    def __init__(self, dtypes: Mapping[str, torch.dtype], max_rows: int, device: torch.device) -> None:
        size = sum(_width(max_rows, dtype) for dtype in dtypes.values())
        on_cpu = device.type == "cpu"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=not on_cpu and size > 0)
        self._device = self._host if on_cpu else torch.zeros(size, dtype=torch.uint8, device=device)
        self._host_columns = {name: column.numpy() for name, column in _cut(self._host, dtypes, max_rows).items()}
        self._device_columns = _cut(self._device, dtypes, max_rows)

    def fill(self, values: Mapping[str, np.ndarray], rows: int) -> None:
        for name, column in self._host_columns.items():
            column[:rows] = values[name]

    def sent(self) -> Columns:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
        return self._device_columns


def _cut(block: torch.Tensor, dtypes: Mapping[str, torch.dtype], max_rows: int) -> Columns:
    columns, start = {}, 0
    for name, dtype in dtypes.items():
        columns[name] = block[start : start + max_rows * dtype.itemsize].view(dtype)
        start += _width(max_rows, dtype)
    return columns


def _width(max_rows: int, dtype: torch.dtype) -> int:
    return -(-max_rows * dtype.itemsize // _ALIGNED) * _ALIGNED
