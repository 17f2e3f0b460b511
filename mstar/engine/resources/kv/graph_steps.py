"""Captured decode steps that find their lengths and write addresses on the device, and move the lengths on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.device_state import DeviceCounters, DeviceWrites
from mstar.engine.resources.kv.device_pages import DevicePages
from mstar.engine.resources.kv.device_view import DeviceView, ViewBuffers
from mstar.engine.resources.kv.plan import DeferredHostPlan, HostPlan, KVPlan, host_plan
from mstar.engine.resources.kv.step_rows import PlannedRows, StepRows
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import SlotLease, StepContext
from mstar.kernels.decode_state import next_tokens_reference

MOST_LABELS = 4  # that a captured step may address


@dataclass(eq=False)
class GraphStep:
    """The plans of a captured decode step, kept for as long as its slot's buffers hold them.

    ``has_begun``: a forward of the present plan has moved the lengths; ``is_captured``: the graph that will be replayed
    does so.
    """

    rows: StepRows
    lease: SlotLease
    commits: bool  # whether rows grow
    plans: dict[str, KVPlan]
    is_captured: bool
    compute: Callable[[], None]
    has_begun: bool = False

    def begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            with strict_mode.opaque("decode state"):
                self.compute()

    def renewed(self) -> dict[str, KVPlan]:
        """The plans, for the rows' next tokens."""
        self.has_begun = False
        for plan in self.plans.values():
            assert isinstance(plan.host, DeferredHostPlan)
            plan.host.renew()
        return self.plans


class DeviceState:
    """Page table and lengths of all streams on the device, and the views by which steps read them.

    ``moves_lengths``: captured decode steps move the lengths themselves (:meth:`plan`); ``num_moved`` have.  The host's
    arrays are what counts; :meth:`bring` sends what a step needs of them and the device does not have, on the stream on
    which the step will run, since the step before may still read the old.
    """

    def __init__(
        self, streams: Streams, page_size: int, device: torch.device, num_slots: int, moves_lengths: bool
    ) -> None:
        size = MOST_LABELS * streams.total_rows
        self.moves_lengths = moves_lengths
        self.num_moved = 0
        self.writes = DeviceWrites(device)
        self.pages = DevicePages(streams, size, device, self.writes)
        self.lengths = DeviceCounters(size, device, self.writes)
        self._host = streams
        self._page_size = page_size
        self._device = device
        self._num_slots = num_slots
        self._views: dict[str, ViewBuffers] = {}
        self._rows = 0
        self._kept: dict[int, GraphStep] = {}  # by slot
        self._captured: set[SlotLease] = set()  # whose graphs move lengths
        self._next: GraphStep | None = None  # the step that runs next, where it moves lengths
        self._next_tokens: Callable[..., Any] = next_tokens_reference
        if device.type == "cuda":
            from mstar.kernels.cuda.decode_state import next_tokens

            self._next_tokens = next_tokens

    def reserve(self, rows: int) -> None:
        """Room for captured steps of ``rows``; only before any capture."""
        self._rows = max(self._rows, rows)
        for buffers in self._views.values():
            buffers.reserve(self._rows)
        self._kept.clear()

    def serves(self, rows: StepRows, ctx: StepContext) -> bool:
        """Whether this is a step of :meth:`plan`; the same answer for all steps of a captured bucket."""
        # A packed bucket replays one graph for rows of any length, so all of its steps must be planned alike.
        return self.moves_lengths and ctx.slot_lease is not None and rows.is_decode and not ctx.is_packed

    def kept(self, rows: StepRows, ctx: StepContext, commits: bool) -> GraphStep | None:
        """The step, where it was the last one planned on its slot."""
        kept = self._kept.get(ctx.slot)
        if kept is None or kept.rows is not rows or kept.lease is not ctx.slot_lease or kept.commits is not commits:
            return None
        return kept

    def plan(
        self, rows: StepRows, ctx: StepContext, commits: bool, index_of: Callable[[str], StepBuffer]
    ) -> dict[str, KVPlan]:
        """The plans of a step that :meth:`serves` names; those of the last step where nothing but lengths and pages
        changed since.

        Args:
            index_of: the static buffer of a label's indices.
        """
        lease = ctx.slot_lease
        assert lease is not None
        kept = self.kept(rows, ctx, commits)
        if kept is None or ctx.capture:
            plans, views = {}, []
            for part in rows.planned:
                halves = index_of(part.label).static(2 * part.num_tokens, lease).halves
                advances = part.is_real32 if commits else None
                views.append((self._buffers(part.label).send(part, None, advances, lease), *halves))
                plans[part.label] = self._plan_of(part, *views[-1])
            compute = functools.partial(self._compute, views, lease if ctx.capture else None)
            kept = GraphStep(rows, lease, commits, plans, lease in self._captured, compute)
            for plan in plans.values():
                plan.head = kept
            self._kept[lease.slot] = kept
        return kept.renewed()

    def view(self, part: PlannedRows, plan: HostPlan, lease: SlotLease | None) -> DeviceView:
        """A view of rows whose lengths the host sends."""
        if lease is not None:
            self._kept.pop(lease.slot, None)  # its buffers hold this step now
        longest = self.pages.table.shape[1] * self._page_size  # a padding row of a capture may be longer
        return self._buffers(part.label).send(part, np.minimum(plan.kv_lens, longest), None, lease)

    def bring(self, rows: StepRows, plans: dict[str, KVPlan]) -> None:
        """Brings what the device does not know of a step's rows, which runs next on the current stream.

        Raises:
            RuntimeError: more labels than captured steps may address.
        """
        if self._host.num_pages.size > self.pages.table.shape[0]:
            raise RuntimeError(f"attention over a table on the device takes {MOST_LABELS} labels, not one more")
        self.pages.bring(rows.streams)
        head = next(iter(plans.values())).head if plans else None
        self._next = head if isinstance(head, GraphStep) else None
        if self._next is not None:
            self.lengths.bring(rows.streams, self._host.stored_len, self._host.epoch)

    def committed(self, rows: StepRows, epoch_before: int) -> None:
        """The step that :meth:`bring` was called for has moved its streams' lengths, and the epoch from
        ``epoch_before``."""
        step, self._next = self._next, None
        if step is not None and (step.has_begun or step.is_captured):
            streams = rows.streams if rows.block is None else rows.block
            self.lengths.moved(streams, rows.spans, epoch_before, self._host.epoch)
            self.num_moved += 1

    def discard(self, slot: int) -> None:
        """What was planned ahead on a slot is not used: its buffers may be on their way on another stream still."""
        self._kept.pop(slot, None)

    def forget(self, rows: StepRows) -> None:
        """It is not known how far a step of these rows came."""
        self._next = None
        self.lengths.forget(rows.streams)

    def _buffers(self, label: str) -> ViewBuffers:
        buffers = self._views.get(label)
        if buffers is None:
            buffers = self._views[label] = ViewBuffers(self.pages.table, self._device, self._num_slots)
            buffers.reserve(self._rows)
        return buffers

    def _plan_of(
        self, part: PlannedRows, view: DeviceView, key_index: torch.Tensor, value_index: torch.Tensor
    ) -> KVPlan:
        def on_host() -> HostPlan:
            return host_plan(part, self._host.stored_len, self._host.page_table, self._page_size)

        return KVPlan(
            label=part.label,
            rows=part.rows,
            streams=part.streams,
            spans=part.spans,
            host=DeferredHostPlan(on_host),
            key_index=key_index,
            value_index=value_index,
            is_decode=True,
            num_tokens=part.num_tokens,
            num_real=part.num_real,
            view=view,
        )

    def _compute(self, views: list[tuple[DeviceView, torch.Tensor, torch.Tensor]], capturing: SlotLease | None) -> None:
        """Runs in the forward."""
        if capturing is not None:
            self._captured.add(capturing)
        for view, key_index, value_index in views:
            self._next_tokens(
                view.streams,
                view.advances,
                self.lengths.values,
                self.pages.table,
                view.kv_lens,
                key_index,
                value_index,
                self._page_size,
            )
