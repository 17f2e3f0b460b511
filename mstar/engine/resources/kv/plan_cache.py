"""Planning a captured decode step from the one before it."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mstar.engine.resources.kv.plan import HostPlan, PagedIndptrs
from mstar.engine.resources.kv.step_rows import PlannedRows

log = logging.getLogger(__name__)

OFF, ON, COMPARE = 0, 1, 2


@dataclass(eq=False)
class _Entry:
    """The last decode step of one layout.

    ``generations`` int64 [n] of ``streams``, its real rows', hold as long as nothing but that step's commit touched
    them.  ``owner`` is that step until it commits.
    """

    streams: np.ndarray
    generations: np.ndarray
    rows: Sequence[PlannedRows]
    plans: list[HostPlan]
    owner: object


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
        rows: Sequence[PlannedRows],
        streams: np.ndarray,
        generations: np.ndarray,
        table: np.ndarray,
        owner: object,
        full: Callable[[], list[HostPlan]],
    ) -> list[HostPlan]:
        """One plan per element of ``rows``.

        Args:
            layout: tells apart steps that take turns, such as those of two nodes.
            rows: what is planned, by plan label.
            streams, generations: int64 [n], of the real rows, after admission.
            table: int32 [streams, pages], after admission.
            owner: the step; see :meth:`committed`.
            full: plans from the streams alone.
        """
        entry = self._entries.get(layout)
        plans = None
        if entry is not None:
            if self._follows(entry, rows, streams, generations):
                self.stats["hit"] += 1
                plans = [
                    advanced(plan, part, table, self._page_size) for plan, part in zip(entry.plans, rows, strict=True)
                ]
            else:
                self.stats["miss"] += 1
        if plans is None:
            plans = full()
        elif self.mode == COMPARE:
            plans = self._compared(plans, full(), rows)
        self._entries[layout] = _Entry(streams, generations, rows, plans, owner)
        return plans

    def committed(self, owner: object, before: np.ndarray, after: np.ndarray) -> None:
        """Step ``owner`` moved its real streams' generations int64 [n] from ``before`` to ``after``."""
        for entry in self._entries.values():
            if entry.owner is owner:
                entry.owner = None
                is_untouched = np.array_equal(entry.generations, before)
                entry.generations = after if is_untouched else np.full_like(after, -1)

    def hand_over(self, owner: object, new_owner: object) -> None:
        """What ``owner`` planned will be committed by ``new_owner``."""
        for entry in self._entries.values():
            if entry.owner is owner:
                entry.owner = new_owner

    def _follows(
        self, entry: _Entry, rows: Sequence[PlannedRows], streams: np.ndarray, generations: np.ndarray
    ) -> bool:
        return (
            entry.owner is None
            and (entry.streams is streams or np.array_equal(entry.streams, streams))
            and np.array_equal(entry.generations, generations)
            and (entry.rows is rows or _same_layout(entry.rows, rows))
        )

    def _compared(self, quick: list[HostPlan], full: list[HostPlan], rows: Sequence[PlannedRows]) -> list[HostPlan]:
        for part, a, b in zip(rows, quick, full, strict=True):
            differing = differences(a, b)
            if differing:
                self.stats["mismatch"] += 1
                log.error("label %r: the cached plan differs from the full one in %s", part.label, ", ".join(differing))
        return full


def advanced(plan: HostPlan, rows: PlannedRows, table: np.ndarray, page_size: int) -> HostPlan:
    """The plan of the step after ``plan``, whose rows all appended one token and append one more.

    Padding rows stay where they are: on the sink page, one token long.
    """
    arrays = plan.indptrs
    starts = plan.starts + rows.is_real
    kv_lens = plan.kv_lens + rows.is_real
    addresses = plan.addresses + rows.is_real
    last_page_len = np.add(arrays.paged_kv_last_page_len, rows.is_real, dtype=np.int32, casting="same_kind")
    kv_indptr, indices = arrays.paged_kv_indptr, arrays.paged_kv_indices
    crossing = np.flatnonzero(last_page_len > page_size)
    if crossing.size:
        last_page_len[crossing] = 1
        pages = table[rows.streams[crossing], starts[crossing] // page_size]
        addresses[crossing] = pages.astype(np.int64) * (2 * page_size)
        indices = inserted(indices, kv_indptr[crossing + 1], pages)
        more = np.zeros(kv_indptr.size, np.int32)
        more[crossing + 1] = 1
        kv_indptr = kv_indptr + np.cumsum(more, dtype=np.int32)
    indptrs = PagedIndptrs(arrays.qo_indptr, kv_indptr, indices, last_page_len, kv_lens.astype(np.int32))
    return HostPlan(starts, kv_lens, indptrs, addresses)


def inserted(array: np.ndarray, before: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``array`` [n] with ``values[i]`` before element ``before[i]``; ``before`` [k] in ascending order."""
    out = np.empty(array.size + values.size, array.dtype)
    is_old = np.ones(out.size, bool)
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


def _same_layout(a: Sequence[PlannedRows], b: Sequence[PlannedRows]) -> bool:
    return len(a) == len(b) and all(
        x.label == y.label and (x.is_real is y.is_real or np.array_equal(x.is_real, y.is_real))
        for x, y in zip(a, b, strict=True)
    )
