"""Bits of allowed tokens, 32 a word, lowest first: their ends made explicit, and logits barred by them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import SlotLease

_BARRED = float("-inf")


def num_words(vocab_size: int) -> int:
    """Words of a mask over ``vocab_size`` tokens and, behind them, the end of the text."""
    return vocab_size // 32 + 1


def bits_of(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The ids below ``vocab_size`` as bits, int32 [words]."""
    bits = np.zeros(num_words(vocab_size) * 32, np.uint8)
    bits[[i for i in ids if i < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def settle_ends(words: np.ndarray, ends: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks int32 [n, words] of grammars, with the ids ``ends`` (alike) that end each row's text allowed exactly where
    the grammar lets the text end.

    Returns:
        The masks, and the rows whose grammar allows nothing but an end, bool [n].
    """
    word, bit = vocab_size >> 5, vocab_size & 31
    may_end = (words[:, word] >> bit) & 1
    text = words.copy()
    text[:, word] &= (1 << bit) - 1
    is_over = ~text.any(axis=1)
    return (text & ~ends) | (ends & -may_end[:, None]), is_over


def runs_of(places: np.ndarray) -> list[tuple[int, int, int]]:
    """Increasing places as stretches of neighbours: (first place, place behind the last, index of the first)."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    starts, stops = [0, *cuts.tolist()], [*cuts.tolist(), places.size]
    return [(int(places[i]), int(places[i]) + j - i, i) for i, j in zip(starts, stops, strict=True) if j > i]


def bar_runs(logits: torch.Tensor, words: np.ndarray, runs: Sequence[tuple[int, int, int]]) -> None:
    """On the host: ``words`` int32 [live, words] of the rows of ``logits`` [bs, V] that ``runs`` tells."""
    bits = np.unpackbits((~words).view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    barred = bits.view(np.bool_)
    host = logits.numpy() if logits.dtype == torch.float32 else None
    for start, stop, first in runs:
        run = barred[first : first + stop - start]
        if host is None:
            logits[start:stop].masked_fill_(torch.from_numpy(run), _BARRED)
        else:
            np.copyto(host[start:stop], _BARRED, where=run)  # a third of torch's time


def bar_rows(logits: torch.Tensor, words: torch.Tensor, mask_of: torch.Tensor) -> None:
    """Bars in ``logits`` [bs, V] what the masks ``words`` int32 [masks, words] do not allow: row ``i`` by mask
    ``mask_of[i]`` int32, or not at all where that is -1.

    On the CPU in torch operators: the reference of :func:`mstar.kernels.cuda.bitmask.bar_rows`.
    """
    if logits.device.type == "cuda":
        from mstar.kernels.cuda.bitmask import bar_rows as bar_in_one_kernel

        bar_in_one_kernel(logits, words, mask_of)
        return
    shifts = torch.arange(32, dtype=torch.int32)
    own = words.index_select(0, mask_of.clamp(min=0))
    is_allowed = ((own.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]] != 0
    logits.masked_fill_(~is_allowed & (mask_of >= 0)[:, None], _BARRED)


class SlotMasks:
    """The masks of a step on a device: those of rows under a grammar, one behind the other, and which row has which.

    Only masks that there are travel, and the rest only when the batch changes.
    """

    def __init__(self, words_per_row: int, device: torch.device, num_slots: int) -> None:
        self._words_per_row = words_per_row
        self._words = StepBuffer(torch.int32, device, num_slots)
        self._mask_of = StepBuffer(torch.int32, device, num_slots, fill=-1)
        self._max_bs = 0
        self._sent: dict[int, tuple[np.ndarray, int]] = {}  # by slot: the places and rows that ``_mask_of`` tells

    def reserve(self, max_bs: int) -> None:
        self._max_bs = max(max_bs, self._max_bs)
        self._words.reserve(max_bs * self._words_per_row)
        self._mask_of.reserve(max_bs)
        self._sent.clear()

    def put(
        self, words: np.ndarray, places: np.ndarray, bs: int, lease: SlotLease | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``words`` int32 [live, words] at ``places`` of ``bs`` rows.

        Returns:
            On the device, as :func:`bar_rows` takes them: masks int32 [masks, words], under a lease as many as there
            is room for, of which the first are these; and which row has which, int32 [bs].
        """
        if lease is None:
            return self._words.put(words.reshape(-1), None).view(words.shape), self._mask_of.put(
                _mask_of(places, bs), None
            )
        if places.size:
            self._words.put(words.reshape(-1), lease)
        sent = self._sent.get(lease.slot)
        if sent is None or sent[1] != bs or not np.array_equal(sent[0], places):
            self._mask_of.put(_mask_of(places, bs), lease)
            self._sent[lease.slot] = places, bs
        room = self._words.view(self._max_bs * self._words_per_row, lease)
        return room.view(self._max_bs, self._words_per_row), self._mask_of.view(bs, lease)


def _mask_of(places: np.ndarray, bs: int) -> np.ndarray:
    mask_of = np.full(bs, -1, np.int32)
    mask_of[places] = np.arange(places.size)
    return mask_of
