"""A step's rows that look back: their logits before the draw, and what the draw leaves in their history."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mstar.kernels.cpu.penalties import apply_length_floor, apply_presence_penalty, apply_window_penalty
from mstar.kernels.penalties import length_floor, presence_penalty, window_penalty

if TYPE_CHECKING:
    from mstar.engine.resources.sampler.history import History
    from mstar.engine.resources.sampler.pool import RowPool

# Of a step on a device, one entry per row; place 0 and penalty 1 for a row that has none.
COLUMNS = {
    "seen": torch.int64,
    "ring": torch.int64,
    "seen_penalty": torch.float32,
    "ring_penalty": torch.float32,
    "window": torch.int64,
    "least": torch.int64,
}


class Overwritten(NamedTuple):
    """Entries [n] of a pool's memory that one draw wrote over, and what they held."""

    memory: torch.Tensor
    entries: torch.Tensor
    before: torch.Tensor

    def put_back(self) -> None:
        self.memory.scatter_(0, self.entries, self.before)


class HostOverwritten(NamedTuple):
    """As :class:`Overwritten`, on the host."""

    memory: np.ndarray
    entries: np.ndarray
    before: np.ndarray

    def put_back(self) -> None:
        self.memory[self.entries] = self.before


class HistoryRows(ABC):
    """``addressed``: the batch it was made for; ``version``: the history's, at that time."""

    addressed: np.ndarray
    version: int
    is_empty: bool

    @abstractmethod
    def constrain(self, logits: torch.Tensor, offset: torch.Tensor, apply_penalty: bool) -> torch.Tensor:
        """Logits [bs, V] after the penalties (unless ``apply_penalty`` is False) and the floor, fp32; may be
        ``logits`` itself, changed.  ``offset`` int64 [bs]: tokens each row has."""

    @abstractmethod
    def record(self, drawn: torch.Tensor, offset: torch.Tensor) -> list[Overwritten] | list[HostOverwritten]:
        """Adds the draw number ``offset`` int64 [bs], ``drawn`` int64 [bs], to the history of kept rows."""


class HostRows(HistoryRows):
    """Only the rows that look back are touched, in place.  ``*_at`` are their places in the batch."""

    def __init__(
        self,
        history: History,
        addressed: np.ndarray,
        version: int,
        seen: np.ndarray,
        ring: np.ndarray,
        penalty: np.ndarray,
        window: np.ndarray,
        least: np.ndarray,
    ) -> None:
        """All but the first and ``version`` are [bs]."""
        self.addressed, self.version = addressed, version
        self._history = history
        self._stop_ids = history.stop_ids.numpy()
        self._seen_at, self._ring_at = np.flatnonzero(seen), np.flatnonzero(ring)
        self._short_at = np.flatnonzero(least)
        self._seen, self._seen_penalty = seen[self._seen_at], penalty[self._seen_at]
        self._ring, self._ring_penalty = ring[self._ring_at], penalty[self._ring_at]
        self._window, self._least = window[self._ring_at], least[self._short_at]
        self.is_empty = not (self._seen.size or self._ring.size or self._least.size)

    def constrain(self, logits: torch.Tensor, offset: torch.Tensor, apply_penalty: bool) -> torch.Tensor:
        logits = logits.float()
        x, pools = logits.numpy(force=True), self._history
        if self._seen.size:
            pools.seen.open(x.shape[1])
        if apply_penalty and self._seen.size:
            apply_presence_penalty(x, self._seen_at, _host(pools.seen)[self._seen], self._seen_penalty)
        if apply_penalty and self._ring.size:
            apply_window_penalty(x, self._ring_at, _host(pools.ring)[self._ring], self._ring_penalty)
        if self._least.size:
            rows = self._short_at[offset.numpy()[self._short_at] < self._least]
            if rows.size:
                apply_length_floor(x, rows, self._stop_ids)
        return logits

    def record(self, drawn: torch.Tensor, offset: torch.Tensor) -> list[HostOverwritten]:
        tokens, pools, changes = drawn.numpy(), self._history, []
        if self._seen.size:
            memory = _host(pools.seen)
            changes.append(_write_on_host(memory, self._seen * memory.shape[1] + tokens[self._seen_at], True))
        if self._ring.size:
            memory, column = _host(pools.ring), offset.numpy()[self._ring_at] % self._window
            changes.append(_write_on_host(memory, self._ring * memory.shape[1] + column, tokens[self._ring_at]))
        return changes


class DeviceRows(HistoryRows):
    """Every row of the batch, by tensors of fixed shape at the slot's own addresses: a graph can hold it."""

    def __init__(
        self, history: History, addressed: np.ndarray, version: int, is_empty: bool, **columns: torch.Tensor
    ) -> None:
        """``columns``: those of ``COLUMNS``, [bs]."""
        self.addressed, self.version, self.is_empty = addressed, version, is_empty
        self._history = history
        self._columns = columns

    def constrain(self, logits: torch.Tensor, offset: torch.Tensor, apply_penalty: bool) -> torch.Tensor:
        x, pools, of = logits.float(), self._history, self._columns
        if pools.has_seen:
            pools.seen.open(x.shape[1])
        if pools.has_seen and apply_penalty:
            x = presence_penalty(x, pools.seen.data.index_select(0, of["seen"]), of["seen_penalty"])
        if pools.has_ring and apply_penalty:
            x = window_penalty(x, pools.ring.data.index_select(0, of["ring"]), of["ring_penalty"])
        if pools.stop_ids.numel():
            x = length_floor(x, pools.stop_ids, offset < of["least"])
        return x

    def record(self, drawn: torch.Tensor, offset: torch.Tensor) -> list[Overwritten]:
        pools, of, changes = self._history, self._columns, []
        if pools.has_seen:
            memory = pools.seen.data
            changes.append(_write(memory, of["seen"] * memory.shape[1] + drawn, True))
        if pools.has_ring:
            memory, column = pools.ring.data, offset % of["window"].clamp(min=1)
            changes.append(_write(memory, of["ring"] * memory.shape[1] + column, drawn))
        return changes


def _host(pool: RowPool) -> np.ndarray:
    assert pool.host is not None
    return pool.host


def _write_on_host(memory: np.ndarray, entries: np.ndarray, values: Any) -> HostOverwritten:
    flat = memory.reshape(-1)
    before = flat[entries]
    flat[entries] = values
    return HostOverwritten(flat, entries, before)


def _write(memory: torch.Tensor, entries: torch.Tensor, values: Any) -> Overwritten:
    flat = memory.view(-1)
    before = flat.index_select(0, entries)
    flat.scatter_(0, entries, values)
    return Overwritten(flat, entries, before)
