"""Which rows the next step runs: one (walk, node), least recently run first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mstar.conductor.rows import IDLE, RowTable
from mstar.engine.batch import Batch


class Batcher:
    """Picks a step's rows.  An unchanged set of rows gives the same :class:`Batch` object again.

    Prefill and decode are states like any other, so with both ready they take turns.
    """

    def __init__(
        self,
        states: Sequence[tuple[str, str]],
        entry_state: int,
        max_rows: Sequence[int | None],
        max_batch_tokens: int,
    ) -> None:
        """
        Args:
            states: (walk, node) of each state.
            entry_state: where requests start; its rows bring their whole prompt, all others one token.
            max_rows: most rows of a step, by state; None is no bound.
            max_batch_tokens: most prompt tokens of a step of several rows.
        """
        self._states = states
        self._entry_state = entry_state
        self._max_rows = max_rows
        self._max_batch_tokens = max_batch_tokens
        self._last_run = np.full(len(states), -1, np.int64)
        self._steps = 0
        self._last_batch: dict[int, tuple[np.ndarray, Batch]] = {}

    def next(self, table: RowTable) -> tuple[np.ndarray, Batch] | None:
        """Master rows int64 [n] and their batch; None when no row can run."""
        ready = (table.state != IDLE) & ~table.is_held
        counts = np.bincount(table.state[ready], minlength=len(self._states))
        if not counts.any():
            return None
        state = int(np.argmin(np.where(counts > 0, self._last_run, self._steps)))
        rows = self._cut(table, state, np.flatnonzero(ready & (table.state == state)))
        self._last_run[state] = self._steps
        table.last_step[rows] = self._steps
        self._steps += 1
        return rows, self._batch(table, state, rows)

    def _cut(self, table: RowTable, state: int, rows: np.ndarray) -> np.ndarray:
        """At most a step's worth: those that waited longest, then those with fewest tokens, then by arrival."""
        bound = self._max_rows[state] or rows.size
        if state != self._entry_state:
            if rows.size <= bound:
                return rows
            order = np.lexsort((table.request_id[rows], table.generated[rows], table.last_step[rows]))
            return np.sort(rows[order[:bound]])
        rows = rows[np.argsort(table.request_id[rows])][:bound]
        fitting = int(np.searchsorted(np.cumsum(table.prompt_tokens[rows]), self._max_batch_tokens, side="right"))
        return rows[: max(fitting, 1)]

    def _batch(self, table: RowTable, state: int, rows: np.ndarray) -> Batch:
        ids = table.request_id[rows]
        last = self._last_batch.get(state)
        if last is not None and np.array_equal(last[0], ids):
            return last[1]
        walk, node = self._states[state]
        infos = [info for row in rows.tolist() if (info := table.infos[row]) is not None]
        batch = Batch(node=node, graph_walk=walk, infos=infos)
        self._last_batch[state] = (ids, batch)
        return batch
