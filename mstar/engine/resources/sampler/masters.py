"""Draw state of every request on the device: how many draws it kept, and the last token it drew."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import SlotLease


@dataclass(frozen=True, eq=False)
class _Target:
    """What a slot's last step was about, and where it read and wrote."""

    rows: np.ndarray
    request_ids: Sequence[int]
    kept: Collection[int] | None
    addressed: np.ndarray
    index: torch.Tensor

    def is_for(self, rows: np.ndarray, request_ids: Sequence[int], kept: Collection[int] | None) -> bool:
        return self.rows is rows and self.request_ids is request_ids and self.kept is kept


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
        self._host = [master.numpy() for master in (self.offset, self.last_token)] if device.type == "cpu" else []
        self._index = StepBuffer(torch.int64, device, num_slots)
        self._restarted = StepBuffer(torch.int64, device, num_slots)
        self._targets: dict[int, _Target] = {}  # by slot, -1 for eager steps

    @property
    def trash_row(self) -> int:
        return self.num_rows

    def reserve(self, max_bs: int) -> None:
        """Room for ``max_bs`` rows in every slot's index row; may move it, so only before any capture."""
        self._index.reserve(max_bs)
        self._restarted.reserve(self.num_rows)
        self._targets.clear()

    def restart(self, rows: Sequence[int], lease: SlotLease | None = None) -> None:
        """Rows of new requests back to no draw at all, in order behind what earlier steps still write to them; the host
        waits for none of these."""
        for master in self._host:
            master[rows] = 0
        if not self._host:
            index = self._restarted.put(np.array(rows), lease if len(rows) <= self.num_rows else None)
            self.offset.index_fill_(0, index, 0)
            self.last_token.index_fill_(0, index, 0)

    def target(
        self, rows: np.ndarray, request_ids: Sequence[int], kept: Collection[int] | None, lease: SlotLease | None
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Where each padded row reads and writes, int64 [padded bs]: on the host, and on the device.

        The latter lies at the slot's own address under a lease, and is sent only where the same objects were not what
        the slot's last step was about: nobody may change ``rows`` or ``kept`` in place.

        Args:
            rows: master rows int64 [padded bs], those of ``request_ids`` first.
            kept: request ids whose draw is kept; None keeps all.
        """
        slot = -1 if lease is None else lease.slot
        target = self._targets.get(slot)
        if target is None or not target.is_for(rows, request_ids, kept):
            addressed = self._addressed(rows, request_ids, kept)
            target = _Target(rows, request_ids, kept, addressed, self._index.put(addressed, lease))
            self._targets[slot] = target
        return target.addressed, target.index

    def holds(
        self, rows: np.ndarray, request_ids: Sequence[int], kept: Collection[int] | None, lease: SlotLease
    ) -> bool:
        """Whether :meth:`target` would send nothing."""
        target = self._targets.get(lease.slot)
        return target is not None and target.is_for(rows, request_ids, kept)

    def _addressed(self, rows: np.ndarray, request_ids: Sequence[int], kept: Collection[int] | None) -> np.ndarray:
        index = rows.copy()
        index[len(request_ids) :] = self.trash_row
        if kept is not None:
            index[[i for i, request_id in enumerate(request_ids) if request_id not in kept]] = self.trash_row
        return index

    def scatter(self, index: torch.Tensor, offset: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Stores ``offset`` and ``tokens`` [padded bs] at ``index``; without tokens only the former."""
        self.offset.index_copy_(0, index, offset)
        if tokens is not None:
            self.last_token.index_copy_(0, index, tokens)

    def put_back(self, index: torch.Tensor, offset: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Where the offsets at ``index`` moved: back to ``offset``, and the tokens back to ``tokens`` [padded bs]."""
        if tokens is not None:
            has_moved = self.offset.index_select(0, index) != offset
            tokens = torch.where(has_moved, tokens, self.last_token.index_select(0, index))
        self.scatter(index, offset, tokens)
