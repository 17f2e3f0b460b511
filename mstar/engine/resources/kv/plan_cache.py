"""Planning a captured decode step from the one before it."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mstar.engine.resources.kv.plan import HostPlan, PagedIndptrs
from mstar.engine.resources.kv.step_rows import PlannedRows, StepRows
from mstar.engine.resources.kv.streams import Streams

log = logging.getLogger(__name__)

OFF, ON, COMPARE = 0, 1, 2


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
    plans: list[HostPlan]
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
        self._page_size = np.array([page_size], np.int32)
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
            table, size = streams.page_table, self._page_size
            plans = [advanced(plan, part, table, size) for plan, part in zip(entry.plans, rows.planned, strict=True)]
            if self.mode == COMPARE:
                plans = self._compared(plans, full(rows), rows.planned)
            entry.rows, entry.plans, entry.owner = rows, plans, owner
            return plans
        if entry is not None:
            self.stats["miss"] += 1
        plans = full(rows)
        self._entries[layout] = _Entry(rows, streams.generation[rows.streams], 0, streams.epoch, plans, owner)
        return plans

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

    def _compared(self, quick: list[HostPlan], full: list[HostPlan], rows: Sequence[PlannedRows]) -> list[HostPlan]:
        for part, a, b in zip(rows, quick, full, strict=True):
            differing = differences(a, b)
            if differing:
                self.stats["mismatch"] += 1
                log.error("label %r: the cached plan differs from the full one in %s", part.label, ", ".join(differing))
        return full


def advanced(plan: HostPlan, rows: PlannedRows, table: np.ndarray, page_size: np.ndarray) -> HostPlan:
    """The plan of the step after ``plan``, whose rows all appended one token and append one more.

    Padding rows stay where they are: on the sink page, one token long.  ``page_size`` int32 [1]: an array is compared
    in half the time that a number takes.
    """
    arrays = plan.indptrs
    starts = plan.starts + rows.is_real if rows.has_padding else plan.kv_lens
    addresses = plan.addresses + rows.is_real
    last_page_len = arrays.paged_kv_last_page_len + rows.is_real32
    kv_indptr, indices = arrays.paged_kv_indptr, arrays.paged_kv_indices
    is_crossing = last_page_len > page_size
    (crossing,) = is_crossing.nonzero()
    if crossing.size:
        last_page_len[crossing] = 1
        behind = crossing + 1
        ends = kv_indptr[behind]
        pages = table[rows.streams[crossing], ends - kv_indptr[crossing]]
        addresses[crossing] = pages.astype(np.int64) * (2 * page_size)
        indices = inserted(indices, ends, pages)
        more = np.zeros(kv_indptr.size, np.int32)
        more[behind] = 1
        kv_indptr = np.add.accumulate(more, out=more) + kv_indptr
    kv_lens32 = arrays.kv_lens + rows.is_real32
    indptrs = PagedIndptrs(arrays.qo_indptr, kv_indptr, indices, last_page_len, kv_lens32)
    return HostPlan(starts, plan.kv_lens + rows.is_real, indptrs, addresses)


def inserted(array: np.ndarray, before: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``array`` [n] with ``values[i]`` before element ``before[i]``; ``before`` [k] in ascending order."""
    out = np.empty(array.size + values.size, array.dtype)
    is_old = np.empty(out.size, bool)
    is_old.fill(True)
    at = before + np.arange(values.size)
    is_old[at] = False
    out[at] = values
    out[is_old] = array
    return out


def differences(a: HostPlan, b: HostPlan) -> list[str]:
    """Names of the arrays in which two plans differ, in value, shape or type."""
    pairs = [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a) if f.name != "indptrs"]
    pairs += [(f.name, getattr(a.indptrs, f.name), getattr(b.indptrs, f.name)) for f in dataclasses.fields(a.indptrs)]
    return [
        name
        for name, x, y in pairs
        if np.asarray(x).dtype != np.asarray(y).dtype or not np.array_equal(np.asarray(x), np.asarray(y))
    ]
