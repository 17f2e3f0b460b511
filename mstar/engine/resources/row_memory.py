"""Device memory that few master rows need: a tensor of their own each, which kernels find by its address."""

from __future__ import annotations

import numpy as np
import torch


class RowMemory:
    """``address`` int64 [num_rows + 1]: where the tensor of each master row lies, 0 for a row without one.

    Captured steps read addresses from their static columns, so tensors come and go as rows do, and memory is what
    they ask for.  A tensor may be let go while steps in flight still use it: the allocator hands its memory out again
    behind them, since whoever lends and releases does so on the steps' stream.

    Lent tensors have ``width`` entries of ``fill``; where the width is not known yet, they wait for :meth:`open`.
    """

    def __init__(self, num_rows: int, width: int | None, dtype: torch.dtype, fill: float, device: torch.device) -> None:
        self.address = np.zeros(num_rows + 1, np.int64)
        self.width = width
        self._dtype, self._fill, self._device = dtype, fill, device
        self._held: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, list[np.ndarray]] = {}  # rows for which there is no width yet, and their marks

    def of(self, row: int) -> torch.Tensor | None:
        return self._held.get(row)

    def hold(self, row: int, tensor: torch.Tensor) -> None:
        """Keeps the row's new ``tensor``, contiguous, instead of what it had."""
        self._held[row] = tensor
        self.address[row] = tensor.data_ptr()

    def lend(self, row: int, afresh: bool = False) -> None:
        """Gives ``row`` a tensor, filled anew if ``afresh`` or if it had none."""
        if self.width is None:
            self._waiting.setdefault(row, [])
        elif afresh or row not in self._held:
            self.hold(row, torch.full((self.width,), self._fill, dtype=self._dtype, device=self._device))

    def release(self, row: int) -> None:
        self._waiting.pop(row, None)
        if self._held.pop(row, None) is not None:
            self.address[row] = 0

    def mark(self, row: int, ids: np.ndarray) -> None:
        """Sets the entries ``ids`` int64 [n] of the row's tensor to 1, if it has one; ids past the width are none."""
        if row in self._waiting:
            self._waiting[row].append(ids)
        elif row in self._held and self.width is not None:
            known = ids[(ids >= 0) & (ids < self.width)]
            self._held[row].index_fill_(0, torch.from_numpy(known).to(self._device, non_blocking=True), 1)

    def open(self, width: int) -> None:
        """Takes the width, where there was none.

        Raises:
            ValueError: it has another.
        """
        if self.width is None:
            self.width = width
            waiting, self._waiting = self._waiting, {}
            for row, marks in waiting.items():
                self.lend(row)
                for ids in marks:
                    self.mark(row, ids)
        elif self.width != width:
            raise ValueError(f"vocab_size must be the width of the logits, {width}, got {self.width}")

    def settle(self) -> None:
        """Nothing is ever left to do: what was asked for lies in the stream."""
