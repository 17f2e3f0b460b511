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
        self._slots = [self._block(0) for _ in range(num_slots)]
        self._max_rows = 0

    def reserve(self, max_rows: int) -> bool:
        """Room for ``max_rows`` rows in every slot; moves the columns, so only before any capture.

        Returns:
            Whether it has: what was put before is gone.
        """
        if max_rows <= self._max_rows:
            return False
        self._max_rows = max_rows
        self._slots = [self._block(max_rows) for _ in self._slots]
        return True

    def block(self, rows: int, lease: SlotLease | None) -> ColumnBlock:
        """Where ``rows`` rows go."""
        return self._block(rows) if lease is None else self._slots[lease.slot]

    def put(self, values: Mapping[str, np.ndarray], lease: SlotLease | None) -> Columns:
        """``values`` of every column, [rows] each, on the device."""
        rows = next(iter(values.values())).size
        block = self.block(rows, lease)
        block.fill(values, rows)
        block.upload()
        return block.columns(rows)

    def _block(self, rows: int) -> ColumnBlock:
        return ColumnBlock(self._dtypes, rows, self._device)


class ColumnBlock:
    """One set of columns: filled on the host, then sent in one copy."""

    def __init__(self, dtypes: Mapping[str, torch.dtype], max_rows: int, device: torch.device) -> None:
        size = sum(_width(max_rows, dtype) for dtype in dtypes.values())
        on_cpu = device.type == "cpu"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=not on_cpu and size > 0)
        self._device = self._host if on_cpu else torch.zeros(size, dtype=torch.uint8, device=device)
        self._host_columns = {name: column.numpy() for name, column in _cut(self._host, dtypes, max_rows).items()}
        self._device_columns = _cut(self._device, dtypes, max_rows)
        self._heads: dict[int, Columns] = {}  # by length

    def fill(self, values: Mapping[str, np.ndarray], rows: int) -> None:
        """Writes ``values`` of every column, [rows] each, on the host alone; what lies behind them stays."""
        for name, column in self._host_columns.items():
            column[:rows] = values[name]

    def take(self, masters: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        """:meth:`fill` with elements ``rows`` int64 [n] of every column's master, which has the column's dtype."""
        for name, column in self._host_columns.items():
            masters[name].take(rows, out=column[: rows.size], mode="clip")  # none is out of range; other modes buffer

    def upload(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def columns(self, rows: int) -> Columns:
        """The leading ``rows`` rows of every column on the device, at addresses that never change."""
        heads = self._heads.get(rows)
        if heads is None:
            if len(self._heads) >= _MOST_KEPT_VIEWS:
                self._heads.clear()
            heads = self._heads[rows] = {name: column[:rows] for name, column in self._device_columns.items()}
        return heads


def _cut(block: torch.Tensor, dtypes: Mapping[str, torch.dtype], max_rows: int) -> Columns:
    columns, start = {}, 0
    for name, dtype in dtypes.items():
        columns[name] = block[start : start + max_rows * dtype.itemsize].view(dtype)
        start += _width(max_rows, dtype)
    return columns


def _width(max_rows: int, dtype: torch.dtype) -> int:
    return -(-max_rows * dtype.itemsize // _ALIGNED) * _ALIGNED
