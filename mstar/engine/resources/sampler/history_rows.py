"""A step's rows that look back: their logits before the draw, and what the draw leaves in their history."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mstar.engine.resources.sampler.pool import RowPool
from mstar.kernels.cpu.penalties import apply_length_floor, apply_presence_penalty, apply_window_penalty

if TYPE_CHECKING:
    from mstar.engine.resources.sampler.history import History


class Overwritten(ABC):
    """What one draw wrote over."""

    @abstractmethod
    def put_back(self) -> None:
        """As if there had been no such draw; the last draw's first."""


class HostOverwritten(Overwritten):
    """Entries [n] of an array, and what they held."""

    def __init__(self, memory: np.ndarray, entries: np.ndarray, before: np.ndarray) -> None:
        self._memory, self._entries, self._before = memory, entries, before

    def put_back(self) -> None:
        self._memory[self._entries] = self._before


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
    def record(self, drawn: torch.Tensor, offset: torch.Tensor) -> Sequence[Overwritten]:
        """Adds the draw number ``offset`` int64 [bs], ``drawn`` int64 [bs], to the history of kept rows."""


class HostRows(HistoryRows):
    """Only the rows that look back are touched, in place.  ``*_at`` are their places in the batch."""

    def __init__(self, history: History, addressed: np.ndarray, version: int) -> None:
        """``addressed`` [bs]: master rows."""
        self.addressed, self.version = addressed, version
        self._history = history
        self._stop_ids = history.stop_ids
        seen, ring = history.seen.address[addressed], history.ring.address[addressed]
        penalty, least = history.penalty[addressed], history.least[addressed]
        self._seen_at, self._ring_at = np.flatnonzero(seen), np.flatnonzero(ring)
        self._short_at = np.flatnonzero(least)
        self._seen, self._seen_penalty = seen[self._seen_at], penalty[self._seen_at]
        self._ring, self._ring_penalty = ring[self._ring_at], penalty[self._ring_at]
        self._window, self._least = history.window[addressed][self._ring_at], least[self._short_at]
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
            changes.append(_write(memory, self._seen * memory.shape[1] + tokens[self._seen_at], True))
        if self._ring.size:
            memory, column = _host(pools.ring), offset.numpy()[self._ring_at] % self._window
            changes.append(_write(memory, self._ring * memory.shape[1] + column, tokens[self._ring_at]))
        return changes


def _host(pool: object) -> np.ndarray:
    assert isinstance(pool, RowPool)
    return pool.host


def _write(memory: np.ndarray, entries: np.ndarray, values: Any) -> HostOverwritten:
    flat = memory.reshape(-1)
    before = flat[entries]
    flat[entries] = values
    return HostOverwritten(flat, entries, before)
