"""The edits of one composition of a batch: everything that does not change from step to step, flat over its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mstar.engine.resources.logit_edits.recent_tokens import RecentTokens
from mstar.engine.resources.logit_edits.row_edits import RowEdits
from mstar.engine.resources.logit_edits.token_counts import TokenCounts
from mstar.engine.resources.ragged import ragged_arange
from mstar.kernels.cpu.penalties import without_any


@dataclass(frozen=True)
class LiveRow:
    """A row of the batch that has edits: its place there, and whether its draw is kept."""

    place: int
    row: int
    edits: RowEdits
    is_kept: bool


class Floor(NamedTuple):
    """Rows whose stop ids are barred: their places int64 [low], and the flat indices of these ids, int64
    [``lengths``.sum()]."""

    places: np.ndarray
    lengths: np.ndarray
    at: torch.Tensor


class _Moves:
    """Rows whose state moves with their tokens: their places in the batch, and their slots."""

    def __init__(self, live: Sequence[LiveRow], slots: np.ndarray) -> None:
        kept = np.array([each.is_kept for each in live], bool)
        self.places = torch.from_numpy(np.array([each.place for each in live], np.int64)[kept])
        self.slots = torch.from_numpy(slots[kept])


class BatchEdits:
    """Flat indices are into logits [rows, vocab] laid out row behind row."""

    _is_low: np.ndarray  # whose floors ``_floor`` holds
    _floor: Floor

    def __init__(
        self,
        live: Sequence[LiveRow],
        vocab_size: int,
        recent: RecentTokens,
        counts: TokenCounts,
    ) -> None:
        self._vocab, self._recent, self._counts = vocab_size, recent, counts
        self.is_empty = not live
        self.kept_rows = np.array([each.row for each in live if each.is_kept], np.int64)
        self.penalized_rows = np.array([each.row for each in live if each.edits.has_penalty], np.int64)
        limited = [each for each in live if each.edits.allowed.size]
        self._limited = self._places(limited)
        self._allowed = self._flat(limited, [each.edits.allowed for each in limited])
        self._barred = self._flat(live, [each.edits.barred for each in live])
        self._bias_at = self._flat(live, [each.edits.bias_ids for each in live])
        self._bias = torch.from_numpy(_joined([each.edits.bias for each in live], np.float32))
        self._init_floors([each for each in live if each.edits.has_floor])
        self._init_words([each for each in live if each.edits.word_last.size])
        self._init_penalties([each for each in live if each.edits.has_penalty])

    def floor(self, kept: np.ndarray) -> Floor:
        """Whose stop ids are barred while ``kept`` int64 [total_rows] counts kept tokens."""
        if self._floor_rows.size:
            is_low = kept[self._floor_rows] < self._floor_until
            if not np.array_equal(is_low, self._is_low):
                self._is_low = is_low
                at = torch.from_numpy(self._floor_all[np.repeat(is_low, self._floor_lengths)])
                self._floor = Floor(self._floor_places[is_low], self._floor_lengths[is_low], at)
        return self._floor

    def apply(self, logits: torch.Tensor) -> None:
        """Edits ``logits`` fp32 [rows, vocab] in place, but for the floor; contiguous."""
        flat = logits.view(-1)
        if self._limited.numel():
            allowed = flat.index_select(0, self._allowed)
            logits.index_fill_(0, self._limited, -torch.inf)
            flat.index_copy_(0, self._allowed, allowed)
        if self._barred.numel():
            flat.index_fill_(0, self._barred, -torch.inf)
        if self._word_last.numel():
            flat.index_add_(0, self._word_last, self._completions())
        if self._bias_at.numel():
            flat.index_add_(0, self._bias_at, self._bias)
        if self._penalty_slots.numel():
            self._penalize(flat)

    def hold_back(self, logits: torch.Tensor, floor: Floor) -> None:
        """Bars the stop ids of ``floor`` in ``logits`` fp32 [rows, vocab], contiguous, unless a row has no other."""
        flat = logits.view(-1)
        before = flat.index_select(0, floor.at)
        flat.index_fill_(0, floor.at, -torch.inf)
        spared = without_any(logits.numpy(), floor.places)
        if not spared.size:
            return
        is_spared = torch.zeros(floor.places.size, dtype=torch.bool)
        is_spared[spared] = True
        row = torch.from_numpy(np.arange(floor.lengths.size).repeat(floor.lengths))
        flat.index_copy_(0, floor.at, torch.where(is_spared.index_select(0, row), before, -torch.inf))

    def move(self, tokens: torch.Tensor) -> None:
        """Takes ``tokens`` int64 [rows] as the newest of the rows that keep theirs."""
        if self._word_moves.slots.numel():
            self._recent.push(self._word_moves.slots, tokens.index_select(0, self._word_moves.places))
        if self._penalty_moves.slots.numel():
            self._counts.push(self._penalty_moves.slots, tokens.index_select(0, self._penalty_moves.places))

    def _init_floors(self, live: list[LiveRow]) -> None:
        self._floor_rows = np.array([each.row for each in live], np.int64)
        self._floor_until = np.array([each.edits.min_tokens for each in live], np.int64)
        self._floor_places = np.array([each.place for each in live], np.int64)
        self._floor_lengths = np.array([each.edits.stop_ids.size for each in live], np.int64)
        self._floor_all = _joined([each.edits.stop_ids + each.place * self._vocab for each in live])
        self._is_low = np.zeros(len(live), bool)
        nobody = np.empty(0, np.int64)
        self._floor = Floor(nobody, nobody, torch.from_numpy(nobody))

    def _init_words(self, live: list[LiveRow]) -> None:
        slots = self._recent.slots_of(np.array([each.row for each in live], np.int64))
        self._word_moves = _Moves(live, slots)
        self._word_last = self._flat(live, [each.edits.word_last for each in live])
        lengths = _joined([each.edits.word_lengths for each in live])
        slot_of_word = slots.repeat([each.edits.word_last.size for each in live])
        before = slot_of_word.repeat(lengths) * self._recent.tokens.shape[1] + ragged_arange(lengths)
        self._before_at = torch.from_numpy(before)
        self._before = torch.from_numpy(_joined([each.edits.word_before for each in live]))
        self._before_word = torch.from_numpy(np.arange(lengths.size).repeat(lengths))

    def _init_penalties(self, live: list[LiveRow]) -> None:
        slots = self._counts.slots_of(np.array([each.row for each in live], np.int64))
        self._penalty_moves = _Moves(live, slots)
        self._penalty_slots = torch.from_numpy(slots)
        self._penalty_places = self._places(live)
        self._presence = torch.from_numpy(np.array([each.edits.presence for each in live], np.float32))
        self._frequency = torch.from_numpy(np.array([each.edits.frequency for each in live], np.float32))

    def _completions(self) -> torch.Tensor:
        """What is added to each word's last id: -inf where that would complete the word, else 0."""
        newest = self._recent.tokens.view(-1).index_select(0, self._before_at)
        differing = torch.zeros(self._word_last.numel())
        differing.index_add_(0, self._before_word, (newest != self._before).float())
        return torch.where(differing == 0, -torch.inf, 0.0)

    def _penalize(self, flat: torch.Tensor) -> None:
        at, ids, counts = self._counts.generated(self._penalty_slots)
        penalty = self._presence.index_select(0, at) + self._frequency.index_select(0, at) * counts
        flat.index_add_(0, self._penalty_places.index_select(0, at) * self._vocab + ids, penalty, alpha=-1)

    def _places(self, live: Sequence[LiveRow]) -> torch.Tensor:
        return torch.from_numpy(np.array([each.place for each in live], np.int64))

    def _flat(self, live: Sequence[LiveRow], ids: Sequence[np.ndarray]) -> torch.Tensor:
        parts = [own + each.place * self._vocab for each, own in zip(live, ids, strict=True) if own.size]
        return torch.from_numpy(_joined(parts))


def _joined(parts: Sequence[np.ndarray], dtype: type = np.int64) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
