"""Planning a captured decode step from the one before it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from mstar.engine.resources.kv.moving_plan import MovingPlan
from mstar.engine.resources.kv.plan import HostPlan
from mstar.engine.resources.kv.step_rows import StepRows
from mstar.engine.resources.kv.streams import Streams

log = logging.getLogger(__name__)

OFF, ON, COMPARE = 0, 1, 2

_ARRAYS = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "kv_lens")


@dataclass(eq=False)
class _Entry:
    """The last decode step of one layout.

    ``generations`` int64 [n] of its real streams when it was planned in full; ``steps`` times it was committed since,
    each of which moved every one of them by 1.  They were that at ``epoch`` of the streams.  ``owner`` is its step
    until it commits; ``is_void`` when that found them moved by others.
    """

    rows: StepRows
    generations: np.ndarray
    steps: int
    epoch: int
    moving: list[MovingPlan]
    owner: object
    is_void: bool = False

    def is_as_committed(self, streams: Streams) -> bool:
        """Whether the streams are still as this step left them.  Compares them only after an epoch of others."""
        if self.epoch != streams.epoch:
            if not np.array_equal(streams.generation[self.rows.streams], self.generations + self.steps):
                return False
            self.epoch = streams.epoch
        return True


class PlanCache:
    """Plans of decode steps, where every row appends one token, advanced by one token from step to step.

    ``mode``: 0 off; 1 on; 2 plans in full as well, logs every difference and returns the full plan.  ``stats`` counts
    hits, misses (there was a plan of this layout, but not of this step's predecessor) and mismatches.
    """

    def __init__(self, mode: int, page_size: int) -> None:
        self.mode = mode
        self.stats: Counter[str] = Counter(hit=0, miss=0, mismatch=0)
        self._page_size = page_size
        self._entries: dict[Hashable, _Entry] = {}

    def plan(
        self,
        layout: Hashable,
        rows: StepRows,
        streams: Streams,
        owner: object,
        full: Callable[[StepRows], list[HostPlan]],
    ) -> list[HostPlan]:
        """One plan per element of ``rows.planned``.

        Args:
            layout: tells apart steps that take turns, such as those of two nodes.
            streams: their state, after admission.
            owner: the step; see :meth:`committed`.
            full: plans from the streams alone.
        """
        entry = self._entries.get(layout)
        if entry is not None and self._follows(entry, rows, streams):
            self.stats["hit"] += 1
            plans = [moving.next(streams.page_table) for moving in entry.moving]
            if self.mode == COMPARE:
                plans = self._compared(plans, full(rows), entry)
            entry.rows, entry.owner = rows, owner
            return plans
        if entry is not None:
            self.stats["miss"] += 1
        plans = full(rows)
        moving = self._moving(plans, rows)
        self._entries[layout] = _Entry(rows, streams.generation[rows.streams], 0, streams.epoch, moving, owner)
        return plans

    def _moving(self, plans: list[HostPlan], rows: StepRows) -> list[MovingPlan]:
        return [MovingPlan(plan, part, self._page_size) for plan, part in zip(plans, rows.planned, strict=True)]

    def committed(self, owner: object, streams: Streams, epoch_before: int) -> None:
        """Step ``owner`` has moved the generations of its real streams by 1 each, and the epoch from
        ``epoch_before``."""
        for entry in self._entries.values():
            if entry.owner is owner:
                entry.owner = None
                entry.steps += 1
                if entry.epoch == epoch_before:
                    entry.epoch = streams.epoch
                else:
                    entry.is_void = not entry.is_as_committed(streams)

    def hand_over(self, owner: object, new_owner: object) -> None:
        """What ``owner`` planned will be committed by ``new_owner``."""
        for entry in self._entries.values():
            if entry.owner is owner:
                entry.owner = new_owner

    def _follows(self, entry: _Entry, rows: StepRows, streams: Streams) -> bool:
        before = entry.rows
        return (
            entry.owner is None
            and not entry.is_void
            and before.layout == rows.layout
            and (before.streams is rows.streams or np.array_equal(before.streams, rows.streams))
            and entry.is_as_committed(streams)
        )

    def _compared(self, quick: list[HostPlan], full: list[HostPlan], entry: _Entry) -> list[HostPlan]:
        for part, a, b in zip(entry.rows.planned, quick, full, strict=True):
            differing = differences(a, b)
            if differing:
                self.stats["mismatch"] += 1
                log.error("label %r: the cached plan differs from the full one in %s", part.label, ", ".join(differing))
                entry.moving = self._moving(full, entry.rows)
        return full


def differences(a: HostPlan, b: HostPlan) -> list[str]:
    """Names of the arrays in which two plans differ, in value, shape or type."""
    pairs = [(name, getattr(a, name), getattr(b, name)) for name in ("starts", "kv_lens", "addresses")]
    pairs += [(name, getattr(a.indptrs, name), getattr(b.indptrs, name)) for name in _ARRAYS]
    return [
        name
        for name, x, y in pairs
        if np.asarray(x).dtype != np.asarray(y).dtype or not np.array_equal(np.asarray(x), np.asarray(y))
    ]
