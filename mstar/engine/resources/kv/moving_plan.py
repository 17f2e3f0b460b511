"""A decode step's plan that moves on with its rows, by one token each."""

from __future__ import annotations

import numpy as np

from mstar.engine.resources.kv.plan import HostPlan, PagedIndptrs
from mstar.engine.resources.kv.step_rows import PlannedRows


class MovingPlan:
    """Plans the steps after ``plan``, in each of which every row appends one token.

    Padding rows stay where they are: on the sink page, one token long.  Arrays that a plan hands out are never written
    again, but for ``addresses``, which are on their way to the device by then.
    """

    def __init__(self, plan: HostPlan, rows: PlannedRows, page_size: int) -> None:
        self._plan = plan
        self._indptrs = plan.indptrs  # made now, as later on a row may hold more
        self._rows = rows
        self._page_size = page_size
        self._page_span = np.array([2 * page_size])  # keys and values; an array multiplies faster than a number
        self._room_until: np.ndarray | None = None  # length at which a row's pages are full, int64 [B]

    def next(self, table: np.ndarray) -> HostPlan:
        """The plan of the step after the last one; ``table`` int32 [streams, pages] has its pages."""
        before, rows = self._plan, self._rows
        if self._room_until is None:  # not before, since many batches don't come to a second step
            self._room_until = before.kv_lens + -before.kv_lens % self._page_size
        kv_lens, addresses, arrays = before.kv_lens + rows.is_real, before.addresses, self._indptrs
        np.add(addresses, rows.is_real, addresses)
        kv_indptr, indices = arrays.paged_kv_indptr, arrays.paged_kv_indices
        (crossing,) = (kv_lens > self._room_until).nonzero()
        if crossing.size:
            self._room_until[crossing] += self._page_size
            behind = crossing + 1
            ends = kv_indptr[behind]
            pages = table[rows.streams[crossing], ends - kv_indptr[crossing]]
            addresses[crossing] = pages.astype(np.int64) * self._page_span
            indices = inserted(indices, ends, pages)
            more = np.zeros(kv_indptr.size, np.int32)
            more[behind] = 1
            kv_indptr = np.add.accumulate(more, out=more) + kv_indptr
        starts = before.starts + rows.is_real if rows.has_padding else before.kv_lens
        kv_lens32 = arrays.kv_lens + rows.is_real32
        self._indptrs = indptrs = PagedIndptrs(arrays.qo_indptr, kv_indptr, indices, kv_lens32, arrays.page_size)
        self._plan = HostPlan(starts, kv_lens, addresses, indptrs)
        return self._plan


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
