"""The newest tokens of the requests that have bad words of several tokens."""

from __future__ import annotations

import numpy as np
import torch

from mstar.engine.resources.logit_edits.row_slots import RowSlots, enlarged

_NO_TOKEN = -1


class RecentTokens:
    """``tokens`` int64 [slots, length]: each row's newest first, -1 where there are none yet.

    Slots and length follow what rows asked for at the next :meth:`settle`, which comes before the step that needs
    them and behind all earlier ones.
    """

    def __init__(self, total_rows: int) -> None:
        self._slots = RowSlots(total_rows)
        self._length = 0
        self.tokens = torch.empty(0, 0, dtype=torch.int64)

    def take(self, row: int, length: int) -> None:
        """Keeps ``length`` tokens of the row from now on."""
        self._slots.take(row)
        self._length = max(self._length, length)

    def give_back(self, row: int) -> None:
        self._slots.give_back(row)

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        return self._slots.of_row[rows]

    def settle(self) -> None:
        new = self._slots.newly_taken()
        self.tokens = enlarged(self.tokens, (self._slots.count, self._length), _NO_TOKEN)
        if new:
            self.tokens[new] = _NO_TOKEN

    def push(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """``tokens`` int64 [n] are the newest of ``slots`` int64 [n], which are distinct."""
        older = self.tokens.index_select(0, slots)[:, :-1]
        self.tokens.index_copy_(0, slots, torch.cat((tokens[:, None], older), 1))
