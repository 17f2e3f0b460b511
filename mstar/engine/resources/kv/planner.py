"""From a step's rows to its plans: index arrays on the host, write addresses on the device."""

from __future__ import annotations

import numpy as np
import torch

from mstar.engine.resources.kv.pinned_ring import PinnedRing
from mstar.engine.resources.kv.plan import HostPlan, KVPlan, PagedIndptrs, host_plan
from mstar.engine.resources.kv.plan_cache import OFF, PlanCache
from mstar.engine.resources.kv.step_rows import PlannedRows, StepRows
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import StepContext


class Planner:
    """Plans over ``streams``, through the plan cache and the page-locked ring where those are on.

    Static index buffers are one per (plan label, slot), as long as the largest capture.
    """

    def __init__(
        self,
        streams: Streams,
        page_size: int,
        device: torch.device,
        num_slots: int,
        cache: PlanCache,
        ring: PinnedRing | None,
    ) -> None:
        self._streams = streams
        self._page_size = page_size
        self._device = device
        self._num_slots = num_slots
        self._cache = cache
        self._ring = ring
        self._buffers: dict[str, StepBuffer] = {}
        self._length = 0

    def reserve(self, tokens: int) -> None:
        """Grows the static buffers to ``tokens``; only before any capture."""
        self._length = max(self._length, tokens)
        for buffer in self._buffers.values():
            buffer.reserve(2 * self._length)

    def plan(self, rows: StepRows, ctx: StepContext) -> dict[str, KVPlan]:
        """The step's plans by plan label, after its admission."""
        if self._ring is not None:
            self._ring.begin()
        return {
            part.label: self._finished(part, plan, ctx, len(rows.planned))
            for part, plan in zip(rows.planned, self._host_plans(rows, ctx), strict=True)
        }

    def _host_plans(self, rows: StepRows, ctx: StepContext) -> list[HostPlan]:
        lease = ctx.slot_lease
        if self._cache.mode == OFF or lease is None or ctx.capture or not rows.is_decode:
            return self._from_streams(rows)
        return self._cache.plan(
            layout=(lease.bucket.graph_walk, lease.bucket.cg_key_info),
            rows=rows.planned,
            streams=rows.streams,
            generations=self._streams.generation[rows.streams],
            table=self._streams.page_table,
            owner=ctx,
            full=lambda: self._from_streams(rows),
        )

    def _from_streams(self, rows: StepRows) -> list[HostPlan]:
        stored, table = self._streams.stored_len, self._streams.page_table
        return [host_plan(part, stored, table, self._page_size) for part in rows.planned]

    def _finished(self, part: PlannedRows, plan: HostPlan, ctx: StepContext, num_plans: int) -> KVPlan:
        tokens = part.num_tokens
        num_tokens = ctx.padded_tokens(part.spans, num_plans) if ctx.pads_tokens else tokens
        index = np.empty(2 * num_tokens, np.int64)  # keys, then values: one copy to the device
        index[:tokens] = plan.addresses
        if tokens < num_tokens:
            index[tokens:num_tokens] = 0  # the sink page's first element
        np.add(index[:num_tokens], self._page_size, out=index[num_tokens:])
        on_device = self._buffer(part.label).put(index, ctx.slot_lease)
        return KVPlan(
            label=part.label,
            rows=part.rows,
            streams=part.streams,
            starts=plan.starts,
            spans=part.spans,
            kv_lens=plan.kv_lens,
            indptrs=plan.indptrs if self._ring is None else self._pinned(plan.indptrs, self._ring),
            key_index=on_device[:num_tokens],
            value_index=on_device[num_tokens:],
            is_decode=part.is_decode,
            num_tokens=num_tokens,
            num_real=part.num_real,
        )

    def _pinned(self, arrays: PagedIndptrs, ring: PinnedRing) -> PagedIndptrs:
        # Four arrays of each label are on their way per slot, and those of one more label while it is planned.
        ring.ensure_depth(4 * len(self._buffers) * self._num_slots + 4)
        return PagedIndptrs(
            qo_indptr=ring.take(arrays.qo_indptr),
            paged_kv_indptr=ring.take(arrays.paged_kv_indptr),
            paged_kv_indices=ring.take(arrays.paged_kv_indices),
            paged_kv_last_page_len=ring.take(arrays.paged_kv_last_page_len),
            kv_lens=arrays.kv_lens,
        )

    def _buffer(self, label: str) -> StepBuffer:
        buffer = self._buffers.get(label)
        if buffer is None:
            buffer = self._buffers[label] = StepBuffer(torch.int64, self._device, self._num_slots)
            buffer.reserve(2 * self._length)
        return buffer
