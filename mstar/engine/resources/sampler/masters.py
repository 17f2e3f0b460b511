"""Draw state of every request on the device: how many draws it kept, and the last token it drew."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import SlotLease


class DrawMasters:
    """``offset`` and ``last_token``, int64 [num_rows + 1], by master row.

    Both stay where they are for the engine's life, so that a captured step may address them.  The last row is the
    trash row: whatever is not kept (padding, dropped draws) reads and writes there.  It starts at 0 and only ever
    holds sampled ids, so it is always a valid embedding index.
    """

    def __init__(self, num_rows: int, device: torch.device, num_slots: int) -> None:
        self.num_rows = num_rows
        self.offset = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.last_token = torch.zeros_like(self.offset)
        self._device = device
        self._index = StepBuffer(torch.int64, device, num_slots)
        self._held: dict[int, tuple[bytes, torch.Tensor]] = {}  # slot -> what its index row holds

    @property
    def trash_row(self) -> int:
        return self.num_rows

    def reserve(self, max_bs: int) -> None:
        """Room for ``max_bs`` rows in every slot's index row; may move it, so only before any capture."""
        self._index.reserve(max_bs)
        self._held.clear()

    def restart(self, rows: Sequence[int]) -> None:
        """Rows of new requests back to no draw at all, in order behind what earlier steps still write to them."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self.offset.index_fill_(0, index, 0)
        self.last_token.index_fill_(0, index, 0)

    def addressed(self, rows: np.ndarray, request_ids: Sequence[int], kept: Collection[int] | None) -> np.ndarray:
        """Where each padded row reads and writes, int64 [padded bs].

        Args:
            rows: master rows int64 [padded bs], those of ``request_ids`` first.
            kept: request ids whose draw is kept; None keeps all.
        """
        index = rows.copy()
        index[len(request_ids) :] = self.trash_row
        if kept is not None:
            index[[i for i, request_id in enumerate(request_ids) if request_id not in kept]] = self.trash_row
        return index

    def index_row(self, addressed: np.ndarray, lease: SlotLease | None) -> torch.Tensor:
        """``addressed`` on the device; at the slot's own address under a lease, sent only when it has changed."""
        if lease is None:
            return self._index.put(addressed, None)
        content = addressed.tobytes()
        held = self._held.get(lease.slot)
        if held is None or held[0] != content:
            held = self._held[lease.slot] = (content, self._index.put(addressed, lease))
        return held[1]

    def scatter(self, index: torch.Tensor, offset: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Stores ``offset`` and ``tokens`` [padded bs] at ``index``; without tokens only the former."""
        self.offset.index_copy_(0, index, offset)
        if tokens is not None:
            self.last_token.index_copy_(0, index, tokens)
