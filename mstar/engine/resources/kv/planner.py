"""From a step's rows to its plans: index arrays on the host, write addresses on the device."""

from __future__ import annotations

import numpy as np
import torch

from mstar.engine.resources.kv.graph_steps import DeviceState
from mstar.engine.resources.kv.pinned_ring import PinnedRing
from mstar.engine.resources.kv.plan import HostPlan, KVPlan, PagedIndptrs, host_plan
from mstar.engine.resources.kv.plan_cache import OFF, PlanCache
from mstar.engine.resources.kv.step_rows import PlannedRows, StepRows
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import SlotLease, StepContext


class Planner:
    """Plans over ``streams``, through the plan cache and the page-locked ring where those are on.

    Static index buffers are one per (plan label, slot), as long as the largest capture.  ``device_state``, once set,
    gives plans their view on the device.
    """

    device_state: DeviceState | None = None

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
        self._to_value = np.array([page_size])  # from a key's address; an array adds faster than a number
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
        if self.device_state is not None:
            self.device_state.reserve(self._length)

    def keep_on_device(self, state: DeviceState) -> None:
        """Plans have a view on the device from now on."""
        self.device_state = state
        state.reserve(self._length)

    def plan(self, rows: StepRows, ctx: StepContext, commits: bool) -> dict[str, KVPlan]:
        """The step's plans by plan label, after its admission.  ``commits``: the rows will grow."""
        state = self.device_state
        if state is not None and state.serves(rows, ctx):
            return state.plan(rows, ctx, commits, self._buffer)
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
        layout = (lease.bucket.graph_walk, lease.bucket.cg_key_info)
        return self._cache.plan(layout, rows, self._streams, ctx, self._from_streams)

    def _from_streams(self, rows: StepRows) -> list[HostPlan]:
        stored, table = self._streams.stored_len, self._streams.page_table
        return [host_plan(part, stored, table, self._page_size) for part in rows.planned]

    def _finished(self, part: PlannedRows, plan: HostPlan, ctx: StepContext, num_plans: int) -> KVPlan:
        num_tokens = ctx.padded_tokens(part.spans, num_plans) if ctx.pads_tokens else part.num_tokens
        key_index, value_index = self._on_device(part.label, plan.addresses, num_tokens, ctx.slot_lease)
        if self._ring is not None:
            pinned = self._pinned(plan.indptrs, self._ring)
            plan = HostPlan(plan.starts, plan.kv_lens, plan.addresses, pinned)
        return KVPlan(
            label=part.label,
            rows=part.rows,
            streams=part.streams,
            spans=part.spans,
            host=plan,
            key_index=key_index,
            value_index=value_index,
            is_decode=part.is_decode,
            num_tokens=num_tokens,
            num_real=part.num_real,
            view=None if self.device_state is None else self.device_state.view(part, plan, ctx.slot_lease),
        )

    def _on_device(
        self, label: str, addresses: np.ndarray, num_tokens: int, lease: SlotLease | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where keys and values go, each int64 [num_tokens], by one copy to the device."""
        if lease is None:
            index = np.empty(2 * num_tokens, np.int64)
            self._write(index[:num_tokens], index[num_tokens:], addresses)
            on_device = self._buffer(label).put(index, None)
            return on_device[:num_tokens], on_device[num_tokens:]
        view = self._buffer(label).static(2 * num_tokens, lease)
        self._write(*view.host_halves, addresses)
        view.sent()
        return view.halves

    def _write(self, keys: np.ndarray, values: np.ndarray, addresses: np.ndarray) -> None:
        tokens = addresses.size
        if tokens == keys.size:
            keys[...] = addresses
        else:
            keys[:tokens] = addresses
            keys[tokens:] = 0  # the sink page's first element
        np.add(keys, self._to_value, out=values)

    def _pinned(self, arrays: PagedIndptrs, ring: PinnedRing) -> PagedIndptrs:
        # Four arrays of each label are on their way per slot, and those of one more label while it is planned.
        ring.ensure_depth(4 * len(self._buffers) * self._num_slots + 4)
        pinned = PagedIndptrs(
            qo_indptr=ring.take(arrays.qo_indptr),
            paged_kv_indptr=ring.take(arrays.paged_kv_indptr),
            paged_kv_indices=ring.take(arrays.paged_kv_indices),
            kv_lens=arrays.kv_lens,
            page_size=arrays.page_size,
        )
        pinned.paged_kv_last_page_len = ring.take(arrays.paged_kv_last_page_len)
        return pinned

    def _buffer(self, label: str) -> StepBuffer:
        buffer = self._buffers.get(label)
        if buffer is None:
            buffer = self._buffers[label] = StepBuffer(torch.int64, self._device, self._num_slots)
            buffer.reserve(2 * self._length)
        return buffer
