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


def bar_rows(logits: torch.Tensor, words: torch.Tensor) -> None:
    """On a device: ``words`` int32 [bs, words] of every row of ``logits`` [bs, V]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    barred = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]] == 0
    logits.masked_fill_(barred, _BARRED)


class SlotMasks:
    """The masks of a step on a device, one per row of the batch: all bits are set for rows without a grammar."""

    def __init__(self, words_per_row: int, device: torch.device, num_slots: int) -> None:
        self._words_per_row = words_per_row
        self._device = device
        self._buffer = StepBuffer(torch.int32, device, num_slots, fill=-1)
        self._is_moved = [False] * num_slots  # whether any bit of the slot's buffer may be unset

    def reserve(self, max_bs: int) -> None:
        self._buffer.reserve(max_bs * self._words_per_row)

    def put(self, words: np.ndarray, places: np.ndarray, bs: int, lease: SlotLease | None) -> torch.Tensor:
        """``words`` int32 [live, words] at ``places`` of ``bs`` rows, on the device: int32 [bs, words]."""
        shape = (bs, self._words_per_row)
        if lease is None:
            every = np.full(shape, -1, np.int32)
            every[places] = words
            return torch.from_numpy(every).to(self._device, non_blocking=True)
        view = self._buffer.static(bs * self._words_per_row, lease)
        if places.size or self._is_moved[lease.slot]:
            host = view.host.reshape(shape)
            host[...] = -1
            host[places] = words
            view.sent()
            self._is_moved[lease.slot] = True
        return view.device.view(shape)
