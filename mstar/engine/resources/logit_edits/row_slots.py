"""State that few requests need: slots of a pool, handed to the master rows that do."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

_FEWEST_SLOTS = 4


class RowSlots:
    """Which slot of a pool each master row has.  Pools double when they are full and never shrink.

    ``of_row`` int64 [total_rows]: -1 without a slot.
    """

    def __init__(self, total_rows: int) -> None:
        self.of_row = np.full(total_rows, -1, np.int64)
        self.count = 0
        self._free: list[int] = []
        self._new: list[int] = []

    def take(self, row: int) -> None:
        """Gives the row a slot, to be cleared before use; a row that has one keeps it, and what it holds."""
        if self.of_row[row] >= 0:
            return
        if not self._free:
            more = max(self.count, _FEWEST_SLOTS)
            self._free.extend(range(self.count + more - 1, self.count - 1, -1))
            self.count += more
        slot = self.of_row[row] = self._free.pop()
        self._new.append(int(slot))

    def give_back(self, row: int) -> None:
        """Frees the row's slot; rows without one are no error."""
        if self.of_row[row] >= 0:
            self._free.append(int(self.of_row[row]))
            self.of_row[row] = -1

    def newly_taken(self) -> list[int]:
        """Slots to clear; each is named once."""
        new, self._new = self._new, []
        return new


def enlarged(pool: torch.Tensor, shape: Iterable[int], fill: int = 0) -> torch.Tensor:
    """``pool`` in the corner of a tensor of at least this shape; itself where it is large enough."""
    wanted = tuple(max(sizes) for sizes in zip(pool.shape, shape, strict=True))
    if wanted == tuple(pool.shape):
        return pool
    larger = pool.new_full(wanted, fill)
    larger[tuple(slice(size) for size in pool.shape)] = pool
    return larger
