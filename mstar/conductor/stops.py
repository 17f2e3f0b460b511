"""When a row is done: one check over all rows of a step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mstar.conductor.request import FinishReason
from mstar.conductor.rows import RowTable


class StopCheck:
    """End-of-sequence ids as a mask over the vocabulary, stop ids from the row table."""

    def __init__(self, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._is_eos = np.zeros(vocab_size, bool)
        self._is_eos[[token_id for token_id in eos_ids if 0 <= token_id < vocab_size]] = True

    def check(
        self, table: RowTable, rows: np.ndarray, tokens: np.ndarray, is_last: np.ndarray | None
    ) -> np.ndarray | None:
        """How each row stands after its token.

        Args:
            rows: int64 [n] master rows.
            tokens: int64 [n].
            is_last: bool [n], the budget or the last walk ends with this token; None where it is nobody's.

        Returns:
            uint8 [n]: ``STOP`` for an end-of-sequence or stop id, else ``LENGTH`` for a last token; None: all go on.
        """
        stops = self._is_eos[tokens]
        has_stops = np.count_nonzero(stops) > 0
        if has_stops:
            stops &= ~table.ignore_eos[rows]
        if table.stop_ids.shape[1]:
            stops |= (table.stop_ids[rows] == tokens[:, None]).any(axis=1)
            has_stops = True
        if is_last is None:
            if not (has_stops and np.count_nonzero(stops)):
                return None
            is_last = np.zeros(rows.size, bool)
        finish = is_last * np.uint8(FinishReason.LENGTH)
        finish[stops] = FinishReason.STOP
        return finish if np.count_nonzero(finish) else None
