"""Memory that only some requests need: rows of one array on the host, lent to master rows."""

from __future__ import annotations

import numpy as np
import torch

_FIRST_PLACES = 8


class RowPool:
    """``host`` [places, width]: master row ``row`` holds place ``address[row]``, 0 for none.

    Place 0 is nobody's: what is written there means nothing.  Lending and releasing move no memory; what they ask of
    it is done by :meth:`settle`, in order behind the steps that still write to a place of its last owner.
    """

    def __init__(self, num_rows: int, width: int | None, dtype: torch.dtype, fill: float) -> None:
        """``address`` covers ``num_rows`` rows and the trash row behind them.  ``width`` None is told later, by
        :meth:`open`."""
        self.address = np.zeros(num_rows + 1, np.int64)
        self.width = width
        self.host = torch.empty(0, 0, dtype=dtype).numpy()
        self._fill = fill
        self._free: list[int] = []
        self._num_places = 1
        self._pending: list[tuple[int, np.ndarray | None]] = []

    def lend(self, row: int, afresh: bool = False) -> None:
        """Gives ``row`` a place, empty if ``afresh`` or if it had none."""
        place = int(self.address[row])
        if place and not afresh:
            return
        if not place:
            if self._free:
                place = self._free.pop()
            else:
                place, self._num_places = self._num_places, self._num_places + 1
            self.address[row] = place
        self._pending.append((place, None))

    def release(self, row: int) -> None:
        place = int(self.address[row])
        if place:
            self._free.append(place)
            self.address[row] = 0

    def mark(self, row: int, ids: np.ndarray) -> None:
        """Sets the columns ``ids`` int64 [n] of the row's place to 1; an id past the width has no column."""
        if ids.size and self.address[row]:
            self._pending.append((int(self.address[row]), ids))

    def open(self, width: int) -> None:
        """Takes the width, for a pool that was made without one, and settles.

        Raises:
            ValueError: it has another.
        """
        if self.width is None:
            self.width = width
        elif self.width != width:
            raise ValueError(f"vocab_size must be the width of the logits, {width}, got {self.width}")
        self.settle()

    def settle(self) -> None:
        """Does what was asked for since, in that order; nothing as long as the width isn't known."""
        if self.width is None or not self._pending:
            return
        if self.host.shape[0] < self._num_places:
            self._grow(self.width)
        for place, ids in self._pending:
            if ids is None:
                self.host[place] = self._fill
            else:
                self.host[place, ids[(ids >= 0) & (ids < self.width)]] = 1
        self._pending.clear()

    def _grow(self, width: int) -> None:
        places = max(_FIRST_PLACES, 2 * self.host.shape[0], self._num_places)
        host = np.full((places, width), self._fill, self.host.dtype)
        host[: self.host.shape[0]] = self.host.reshape(-1, width)
        self.host = host
