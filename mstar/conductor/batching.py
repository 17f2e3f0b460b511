"""Which rows the next step runs: one (walk, node), least recently run first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mstar.conductor.lanes import Lane
from mstar.conductor.rows import RowTable
from mstar.engine.batch import Batch


@dataclass(frozen=True, eq=False)
class Pick:
    """A step's rows: master rows and request ids, int64 [n], in the batch's order."""

    lane: Lane
    rows: np.ndarray
    request_ids: np.ndarray
    batch: Batch


class Batcher:
    """Picks a step's rows.  An unchanged set of rows gives the same :class:`Batch` object again.

    Prefill and decode are states like any other, so with both ready they take turns; where a combined walk takes
    both, they share its steps instead.
    """

    def __init__(
        self, plain: Sequence[Lane], combined: Sequence[Lane], entry_state: int, max_batch_tokens: int
    ) -> None:
        """
        Args:
            plain: the lane of each state.
            combined: lanes of several states, the last of them the entry state.
            entry_state: where requests start; its rows bring their whole prompt, all others one token.
            max_batch_tokens: most prompt tokens of a step of several rows.
        """
        self._plain = plain
        self._combined = combined
        self._entry_state = entry_state
        self._max_batch_tokens = max_batch_tokens
        self._last_run = [-1] * len(plain)
        self._steps = 0
        # By node and walk, latest first: two, for rows that wait for the host sit out every other step.
        self._last_picks: dict[str, tuple[Pick, ...]] = {}
        self._steady: tuple[int, Pick | None] = (-1, None)  # the table's version when this pick had all ready rows

    def pick(self, table: RowTable) -> Pick | None:
        """The next step's rows; None when no row can run.  Asked again, it answers the same until :meth:`ran`."""
        steady = self.steady(table)
        if steady is not None:
            return steady
        ready = table.ready_states()
        counts = np.bincount(ready + 1, minlength=len(self._plain) + 1).tolist()[1:]  # IDLE is -1
        states = [state for state, count in enumerate(counts) if count]
        if not states:
            return None
        state = min(states, key=self._last_run.__getitem__)
        if len(states) > 1:
            for lane in self._combined:
                if state in lane.states and all(counts[each] for each in lane.states):
                    parts = self._parts(table, lane, ready)
                    if parts is not None:
                        return self._make(table, lane, parts)
        rows = self._cut(table, state, _rows_in(ready, state))
        pick = self._make(table, self._plain[state], [rows])
        if rows.size == sum(counts):
            self._steady = table.version, pick
        return pick

    def steady(self, table: RowTable) -> Pick | None:
        """The pick of all ready rows that was made since anything last changed; None where there is none."""
        return self._steady[1] if table.version == self._steady[0] else None

    def ran(self, table: RowTable, pick: Pick) -> None:
        """The pick was launched: others come first now."""
        for state in pick.lane.states:
            self._last_run[state] = self._steps
        table.last_step.set(pick.rows, self._steps)
        self._steps += 1

    def _parts(self, table: RowTable, lane: Lane, ready: np.ndarray) -> list[np.ndarray] | None:
        """All ready rows of one token, and the prompts that fit beside them; None when not even one does."""
        parts = [_rows_in(ready, state) for state in lane.states]
        taken = sum(rows.size for rows in parts[:-1])
        prompts, tokens = _oldest(table, parts[-1]), self._max_batch_tokens
        if lane.max_rows is not None:
            prompts = prompts[: max(lane.max_rows - taken, 0)]
        if lane.max_tokens is not None:
            tokens = min(tokens, lane.max_tokens - taken)
        parts[-1] = _within(table, prompts, tokens)
        return parts if parts[-1].size else None

    def _cut(self, table: RowTable, state: int, rows: np.ndarray) -> np.ndarray:
        """At most a step's worth: those that waited longest, then those with fewest tokens, then by arrival."""
        lane = self._plain[state]
        bound = lane.max_rows or rows.size
        if state != self._entry_state:
            if rows.size <= bound:
                return rows
            order = np.lexsort((table.request_id[rows], table.issued.values[rows], table.last_step.values[rows]))
            return np.sort(rows[order[:bound]])
        rows = _oldest(table, rows)
        tokens = min(self._max_batch_tokens, lane.max_tokens or self._max_batch_tokens)
        fitting = _within(table, rows[:bound], tokens)
        return fitting if fitting.size else rows[:1]

    def _make(self, table: RowTable, lane: Lane, parts: list[np.ndarray]) -> Pick:
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        ids = table.request_id[rows]
        key = f"{lane.node}/{lane.walk}"
        last_picks = self._last_picks.get(key, ())
        for last in last_picks:
            if last.request_ids.size == ids.size and (last.request_ids == ids).all():
                return last
        infos = tuple(table.infos[rows].tolist())
        walks = None
        if len(parts) > 1:
            walks = tuple(
                itertools.chain.from_iterable(
                    itertools.repeat(walk, part.size) for walk, part in zip(lane.walks, parts, strict=True)
                )
            )
        batch = Batch(lane.node, lane.walk, infos, walks, tuple(ids.tolist()))
        pick = Pick(lane, rows, ids, batch)
        self._last_picks[key] = (pick, *last_picks[:1])
        return pick


def _rows_in(ready: np.ndarray, state: int) -> np.ndarray:
    return (ready == state).nonzero()[0]


def _oldest(table: RowTable, rows: np.ndarray) -> np.ndarray:
    """Rows in order of arrival."""
    return rows[np.argsort(table.request_id[rows])]


def _within(table: RowTable, rows: np.ndarray, tokens: int) -> np.ndarray:
    """As many of the first rows as have at most ``tokens`` prompt tokens together."""
    return rows[: int(np.searchsorted(np.cumsum(table.prompt_tokens[rows]), tokens, side="right"))]
