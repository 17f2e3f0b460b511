"""A step's rows that look back, on a device: kernels over every row of the batch, which a graph can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar.engine.resources.row_memory import RowMemory
from mstar.engine.resources.sampler.history_rows import HistoryRows, Overwritten
from mstar.engine.resources.step import SlotLease
from mstar.kernels.cuda import penalties

if TYPE_CHECKING:
    from mstar.engine.resources.sampler.history import History

COLUMNS = {
    "seen_at": torch.int64,
    "ring_at": torch.int64,
    "least": torch.int64,
    "penalty": torch.float32,
    "window": torch.int32,
}


class DeviceOverwritten(Overwritten):
    """``before`` as :func:`~mstar.kernels.cuda.penalties.record_draws` tells it of ``tokens`` int64 [bs]; ``memories``
    [bs]: what each row has of the two kinds."""

    def __init__(
        self,
        memories: list[tuple[torch.Tensor | None, torch.Tensor | None]],
        tokens: torch.Tensor,
        before: torch.Tensor,
    ) -> None:
        self._memories, self._tokens, self._before = memories, tokens, before

    def put_back(self) -> None:
        """Row by row, after a wait for the device: only a failed step comes here."""
        for (seen, ring), token, was_seen, held, place in zip(
            self._memories, self._tokens.tolist(), *self._before.tolist(), strict=True
        ):
            if seen is not None:
                seen[token] = bool(was_seen)
            if ring is not None:
                ring[place] = held


class DeviceRows(HistoryRows):
    """Columns at the slot's own addresses say what each row looks at, for graphs that have to hold any batch."""

    def __init__(self, history: History, addressed: np.ndarray, version: int, lease: SlotLease | None) -> None:
        """``addressed`` [bs]: master rows."""
        self.addressed, self.version = addressed, version
        self.is_empty = not history.is_looking[addressed].any()
        self._history, self._lease = history, lease
        # Addresses come with the width, which an eager step may learn from its logits alone.
        self._columns = None if history.seen.width is None else self._sent()

    def constrain(self, logits: torch.Tensor, offset: torch.Tensor, apply_penalty: bool) -> torch.Tensor:
        x, history = logits.float().contiguous(), self._history
        if history.has_seen:
            history.seen.open(x.shape[1])
        if self._columns is None:
            self._columns = self._sent()
        of = self._columns
        if history.has_seen and apply_penalty:
            penalties.presence_penalty(x, of["seen_at"], of["penalty"])
        if history.has_ring and apply_penalty:
            assert history.ring.width is not None
            penalties.window_penalty(x, of["ring_at"], of["window"], of["penalty"], history.ring.width)
        if history.device_stop_ids.numel():
            penalties.length_floor(x, history.device_stop_ids, offset, of["least"])
        return x

    def record(self, drawn: torch.Tensor, offset: torch.Tensor) -> list[DeviceOverwritten]:
        of, history = self._columns, self._history
        assert of is not None, "record before constrain"
        if not (history.has_seen or history.has_ring):
            return []
        before = penalties.record_draws(drawn, offset, of["seen_at"], of["ring_at"], of["window"])
        memories = [(_of(history.seen, row), _of(history.ring, row)) for row in self.addressed.tolist()]
        return [DeviceOverwritten(memories, drawn, before)]

    def _sent(self) -> dict[str, torch.Tensor]:
        history, rows = self._history, self.addressed
        columns = {
            "seen_at": history.seen.address[rows],
            "ring_at": history.ring.address[rows],
            "least": history.least[rows],
            "penalty": history.penalty[rows],
            "window": history.window[rows],
        }
        return history.columns.put(columns, self._lease)


def _of(memory: object, row: int) -> torch.Tensor | None:
    assert isinstance(memory, RowMemory)
    return memory.of(row)
