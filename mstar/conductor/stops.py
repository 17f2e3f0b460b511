"""When a row is done: one check over all rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from mstar.conductor.deadlines import Deadlines
from mstar.conductor.request import NO_TOKEN, FinishReason, stop_code
from mstar.conductor.rows import RowTable
from mstar.engine.resources.base import RowVerdict

Accept = Callable[[np.ndarray, np.ndarray], np.ndarray | None]


class Ends(NamedTuple):
    """How each row stands after its token; every array [n].

    ``shown`` int32: the token, or what stands in its place.  ``finish`` uint8.  ``is_output`` bool: the token is part
    of the row's output.  ``is_broken`` bool: the row must end with an error; None where that is true of nobody.
    """

    shown: np.ndarray
    finish: np.ndarray
    is_output: np.ndarray
    is_broken: np.ndarray | None


class StopCheck:
    """All rules that end a row by what it generated, or by the time.

    In order, the first that holds names the end: the request's own stop ids and the model's end-of-sequence ids
    (``STOP``, no output), the grammar that is complete (``STOP``), the last token of the budget (``LENGTH``), the
    deadline (``TIMEOUT``).  Stop strings are the front end's.
    """

    def __init__(self, vocab_size: int, eos_ids: Iterable[int], accept: Accept, deadlines: Deadlines) -> None:
        """``accept``: tells those with a grammar of tokens that rows kept; see ``Engine.accept_tokens``."""
        self._is_eos = np.zeros(vocab_size, bool)
        self._is_eos[[token_id for token_id in eos_ids if 0 <= token_id < vocab_size]] = True
        self._accept = accept
        self._deadlines = deadlines

    def check(self, table: RowTable, rows: np.ndarray, tokens: np.ndarray, is_last: np.ndarray | None) -> Ends | None:
        """How each row stands after its token.

        Args:
            rows: int64 [n] master rows.
            tokens: int64 [n].
            is_last: bool [n], the budget or the last walk ends with this token; None where it is nobody's.

        Returns:
            None: all go on.
        """
        stops, own = self._is_eos[tokens], None
        has_ends = np.count_nonzero(stops) > 0
        if has_ends:
            stops &= ~table.ignore_eos[rows]
        if table.stop_ids.shape[1]:
            own = (table.stop_ids[rows] == tokens[:, None]).any(axis=1)
            stops |= own
            has_ends = True
        if has_ends:
            has_ends = np.count_nonzero(stops) > 0
        verdicts = self._verdicts(table, rows, tokens, stops) if table.waits_for_host.count else None
        late = table.deadline_ns[rows] <= self._deadlines.now_ns() if self._deadlines.are_due() else None
        if not has_ends and is_last is None and verdicts is None and late is None:
            return None
        finish = np.zeros(rows.size, np.uint8)
        is_broken = None
        if late is not None:
            finish[late] = FinishReason.TIMEOUT
        if is_last is not None:
            finish[is_last] = FinishReason.LENGTH
        if verdicts is not None:
            finish[verdicts == RowVerdict.COMPLETE] = FinishReason.STOP
            is_broken = verdicts == RowVerdict.BROKEN
            is_broken = is_broken if np.count_nonzero(is_broken) else None
        finish[stops] = FinishReason.STOP
        if not np.count_nonzero(finish) and is_broken is None:
            return None
        shown = tokens.astype(np.int32)
        shown[stops] = NO_TOKEN
        if own is not None:
            shown[own] = stop_code(tokens[own])
        return Ends(shown, finish, ~stops, is_broken)

    def _verdicts(self, table: RowTable, rows: np.ndarray, tokens: np.ndarray, stops: np.ndarray) -> np.ndarray | None:
        """uint8 [n] of :class:`RowVerdict`; None: all go on."""
        asked = (table.waits_for_host.values[rows] & ~stops).nonzero()[0]
        found = self._accept(rows[asked], tokens[asked]) if asked.size else None
        if found is None:
            return None
        verdicts = np.zeros(rows.size, np.uint8)
        verdicts[asked] = found
        return verdicts
