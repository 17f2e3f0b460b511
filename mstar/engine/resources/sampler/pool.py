"""Memory that only some requests need: rows of one tensor, lent to master rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_FIRST_PLACES = 8


class RowPool:
    """``data`` [places, width]: master row ``row`` holds place ``place[row]``, 0 for none.

    Place 0 is nobody's: what is written there means nothing.  Lending and releasing touch the host alone; what they
    ask of the tensor is done by :meth:`settle`, in order behind the steps that still write to a place of its last
    owner.  On the host the tensor grows and ``host`` is the same memory; on a device captured steps address it, so
    it is made whole when it is first settled.
    """

    def __init__(
        self,
        num_rows: int,
        most: int,
        width: int | None,
        dtype: torch.dtype,
        fill: float,
        device: torch.device,
        on_host: bool,
    ) -> None:
        """``place`` covers ``num_rows`` rows and the trash row behind them; at most ``most`` hold a place at one time.
        ``width`` None is told later, by :meth:`open`."""
        self.place = np.zeros(num_rows + 1, np.int64)
        self.width = width
        self.device = device
        self.data = torch.empty(0, 0, dtype=dtype, device=device)
        self.host = self.data.numpy() if on_host else None
        self._fill = fill
        self._most = most
        self._free: list[int] = []
        self._num_places = 1
        self._pending: list[tuple[int, np.ndarray | None]] = []

    def lend(self, row: int, afresh: bool = False) -> None:
        """Gives ``row`` a place, empty if ``afresh`` or if it had none."""
        place = int(self.place[row])
        if place and not afresh:
            return
        if not place:
            if self._free:
                place = self._free.pop()
            else:
                place, self._num_places = self._num_places, self._num_places + 1
            self.place[row] = place
        self._pending.append((place, None))

    def release(self, row: int) -> None:
        place = int(self.place[row])
        if place:
            self._free.append(place)
            self.place[row] = 0

    def mark(self, row: int, ids: np.ndarray) -> None:
        """Sets the columns ``ids`` int64 [n] of the row's place to 1; an id past the width has no column."""
        if ids.size and self.place[row]:
            self._pending.append((int(self.place[row]), ids))

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
        if self.width is None or (self.host is not None and not self._pending):
            return
        if self.data.shape[0] < self._num_places:
            self._grow(self.width)
        rows: Any = self.data if self.host is None else self.host  # torch refuses some writes to what it made itself
        for place, ids in self._pending:
            if ids is None:
                rows[place] = self._fill
            else:
                known = ids[(ids >= 0) & (ids < self.width)]
                rows[place, known if self.host is not None else torch.from_numpy(known).to(self.device)] = 1
        self._pending.clear()

    def _grow(self, width: int) -> None:
        if self.host is None:
            self.data = torch.full((self._most + 1, width), self._fill, dtype=self.data.dtype, device=self.device)
            return
        places = max(_FIRST_PLACES, 2 * self.data.shape[0], self._num_places)
        host = np.full((places, width), self._fill, self.host.dtype)
        host[: self.host.shape[0]] = self.host.reshape(-1, width)
        self.data, self.host = torch.from_numpy(host), host
