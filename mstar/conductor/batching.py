"""Which rows the next step runs: one (walk, node), least recently run first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mstar.conductor.lanes import Lane
from mstar.conductor.pace import Pace
from mstar.conductor.rows import RowTable
from mstar.engine.batch import Batch


@dataclass(frozen=True, eq=False)
class Pick:
    """A step's rows: master rows and request ids, int64 [n], in the batch's order.

    ``prompt_tokens`` int64 [n]: of its prompt that each row brings; None where no row brings any.
    """

    lane: Lane
    rows: np.ndarray
    request_ids: np.ndarray
    batch: Batch
    prompt_tokens: np.ndarray | None = None


class Batcher:
    """Picks a step's rows.  An unchanged set of rows gives the same :class:`Batch` object again.

    Prefill and decode are states like any other, so with both ready they take turns; where a combined walk takes
    both, they share its steps instead.  Rows of one token are all in; what room is left goes to prompts, those that
    have begun first, then as they got their rows.  Where the node can, the first that does not fit whole brings a part.
    """

    def __init__(
        self,
        plain: Sequence[Lane],
        combined: Sequence[Lane],
        entry_state: int,
        max_batch_tokens: int,
        pace: Pace | None = None,
    ) -> None:
        """
        Args:
            plain: the lane of each state.
            combined: lanes of several states, the last of them the entry state.
            entry_state: where requests start; its rows bring their prompt, all others one token.
            max_batch_tokens: most prompt tokens of a step, unless a single prompt is longer that cannot be split.
            pace: says how many of these may stand beside rows of one token.
        """
        self._plain = plain
        self._combined = combined
        self._entry_state = entry_state
        self._max_batch_tokens = max_batch_tokens
        self._pace = pace
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
                    picked = self._mixed(table, lane, ready)
                    if picked is not None:
                        return picked
        lane, rows = self._plain[state], _rows_in(ready, state)
        if state == self._entry_state:
            prompts, tokens = self._prompts(table, lane, rows, 0, len(states) > 1)
            if not prompts.size:  # too long for any step, and not to be split: alone
                prompts = _in_order(table, rows)[:1]
                tokens = table.prompt_left[prompts]
            return self._make(table, lane, [prompts], tokens)
        rows = self._cut(table, lane, rows)
        pick = self._make(table, lane, [rows])
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

    def _mixed(self, table: RowTable, lane: Lane, ready: np.ndarray) -> Pick | None:
        """All ready rows of one token, and the prompts that fit beside them; None when not even one does."""
        parts = [_rows_in(ready, state) for state in lane.states]
        parts[-1], tokens = self._prompts(table, lane, parts[-1], sum(rows.size for rows in parts[:-1]), True)
        return self._make(table, lane, parts, tokens) if tokens.size else None

    def _prompts(
        self, table: RowTable, lane: Lane, rows: np.ndarray, taken: int, is_waited_for: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of rows with prompts, those for a step with ``taken`` rows of one token, and each one's tokens.

        ``is_waited_for``: by rows that generate, in this step or for the next.
        """
        rows = _in_order(table, rows)
        if lane.max_rows is not None:
            rows = rows[: max(lane.max_rows - taken, 0)]
        left = table.prompt_left[rows]
        ends = left.cumsum()
        wanted = self._max_batch_tokens
        if is_waited_for and self._pace is not None and lane.splits_prompts:
            wanted = min(wanted, self._pace.prompt_tokens)
        room = lane.tokens_left(taken, wanted)
        if lane.splits_prompts and ends.size and ends[-1] > room > 0:
            room = lane.tokens_that_fill(taken, wanted)
        num_whole = int(ends.searchsorted(room, side="right"))
        rest = room - (int(ends[num_whole - 1]) if num_whole else 0)
        if not lane.splits_prompts or num_whole == rows.size or rest <= 0:
            return rows[:num_whole], left[:num_whole]
        tokens = left[: num_whole + 1].copy()
        tokens[-1] = rest
        return rows[: num_whole + 1], tokens

    def _cut(self, table: RowTable, lane: Lane, rows: np.ndarray) -> np.ndarray:
        """At most a step's worth: those that waited longest, then those with fewest tokens, then by arrival."""
        bound = lane.max_rows or rows.size
        if rows.size <= bound:
            return rows
        order = np.lexsort((table.request_id[rows], table.issued.values[rows], table.last_step.values[rows]))
        return np.sort(rows[order[:bound]])

    def _make(
        self, table: RowTable, lane: Lane, parts: list[np.ndarray], prompt_tokens: np.ndarray | None = None
    ) -> Pick:
        """``prompt_tokens``: of each row of the last part."""
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        ids = table.request_id[rows]
        key = f"{lane.node}/{lane.walk}"
        last_picks = self._last_picks.get(key, ())
        brought = spans = None
        if prompt_tokens is not None:
            brought = np.zeros(rows.size, np.int64)
            brought[rows.size - prompt_tokens.size :] = prompt_tokens
            spans = _prompt_parts(table, rows, prompt_tokens)
        for last in last_picks:
            is_same = _are_same_requests(last.request_ids, ids) and last.batch.prompt_parts == spans
            if is_same and _are_equal(last.prompt_tokens, brought):
                return last
        infos = tuple(table.infos[rows].tolist())
        walks: list[str] = []
        sizes = [part.size for part in parts] if len(parts) > 1 else []
        for walk, size in zip(lane.walks, sizes, strict=False):
            walks += [walk] * size
        batch = Batch(lane.node, lane.walk, infos, tuple(walks) or None, spans, rows, ids, tuple(sizes))
        pick = Pick(lane, rows, ids, batch, brought)
        self._last_picks[key] = (pick, *last_picks[:1])
        return pick


def _are_same_requests(first: np.ndarray, second: np.ndarray) -> bool:
    """Ids int64 [n], n > 0.  The last is looked at first: new requests stand behind those that generate."""
    return first.size == second.size and bool(first[-1] == second[-1] and (first == second).all())


def _are_equal(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    return first is second or (first is not None and second is not None and bool((first == second).all()))


def _prompt_parts(table: RowTable, rows: np.ndarray, tokens: np.ndarray) -> tuple[tuple[int, int] | None, ...] | None:
    """As in :class:`Batch`; None where all rows with prompts, the last of ``rows``, bring all of them."""
    num_others = rows.size - tokens.size
    prompts = rows[num_others:]
    begins = table.prompt_at[prompts]
    if ((tokens == table.prompt_left[prompts]) & (begins == table.cached_tokens[prompts])).all():
        return None
    spans = zip(begins.tolist(), (begins + tokens).tolist(), strict=True)
    return (None,) * num_others + tuple((begin, end) if begin < end else None for begin, end in spans)


def _rows_in(ready: np.ndarray, state: int) -> np.ndarray:
    return (ready == state).nonzero()[0]


def _in_order(table: RowTable, rows: np.ndarray) -> np.ndarray:
    """Rows with prompts: those that have run a step already, then as they got their rows."""
    if rows.size < 2:
        return rows
    return rows[np.lexsort((table.joined[rows], table.last_step.values[rows] < 0))]
