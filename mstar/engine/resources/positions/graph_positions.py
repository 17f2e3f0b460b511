"""Captured decode steps that find their positions on the device, build their tables and move the positions on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.device_state import DeviceCounters, DeviceWrites
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.kv.step_rows import block_of
from mstar.engine.resources.positions.config import PositionStep
from mstar.engine.resources.positions.rotary import LabelBuffers, Positions, Rotary
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import SlotLease, StepContext
from mstar.kernels.decode_state import next_positions_reference


@dataclass(eq=False)
class GraphPositions:
    """One label of a captured decode step, kept for as long as its slot's buffers hold it.

    ``moved`` are the streams whose positions move, by ``by`` each.  ``ids``: positions that the step names in place of
    the counters, int64 [B].
    """

    kv_plan: KVPlan
    step: PositionStep
    planned: Positions
    moved: np.ndarray | slice
    by: np.ndarray
    ids: np.ndarray | None
    is_captured: bool  # the graph that will be replayed moves them
    compute: Callable[[], None]
    has_begun: bool = False  # a forward of the present plan has

    def begin(self) -> None:
        """Computes what ``planned`` holds; once per plan."""
        if not self.has_begun:
            self.has_begun = True
            with strict_mode.opaque("positions"):
                self.compute()


class DevicePositions:
    """Every stream's next position on the device, moved on by captured decode steps.

    The host's counters stay what counts; :meth:`bring` sends what the device does not know, on the stream on which the
    step will run.
    """

    def __init__(self, rotary: Rotary, size: int, info: EngineResourceInfo) -> None:
        self.writes = DeviceWrites(info.device)
        self.counters = DeviceCounters(size, info.device, self.writes)
        self._rotary = rotary
        self._info = info
        self._moves: dict[str, StepBuffer] = {}
        self._rows = 0
        self._kept: dict[tuple[str, int], GraphPositions] = {}
        self._captured: set[tuple[str, SlotLease]] = set()
        self._next_positions: Callable[..., Any] = next_positions_reference
        if info.device.type == "cuda":
            from mstar.kernels.cuda.decode_state import next_positions

            self._next_positions = next_positions

    def reserve(self, rows: int) -> None:
        """Room for captured steps of ``rows``; only before any capture."""
        self._rows = max(self._rows, rows)
        for buffer in self._moves.values():
            buffer.reserve(self._rows)
        self._kept.clear()

    def plan(
        self,
        label: str,
        kv_plan: KVPlan,
        step: PositionStep,
        ctx: StepContext,
        buffers: LabelBuffers,
        ids: np.ndarray | None,
        moves_of: Callable[[np.ndarray], np.ndarray] | None,
    ) -> Positions:
        """What a label's forward will compute; the last of the slot where nothing but positions changed since.

        Args:
            kv_plan: has a head.
            ids: as in :class:`GraphPositions`.
            moves_of: by how much each of these streams' positions moves at commit, int64 [n]; 0 for padding.  None: as
                its length does, and the label is the step's only one.
        """
        lease = ctx.slot_lease
        assert lease is not None
        kept = self._kept.get((label, lease.slot))
        if kept is None or kept.kv_plan is not kv_plan or kept.step is not step or ids is not None or ctx.capture:
            moves, moved, by = _with_lengths(kv_plan) if moves_of is None else _apart(kv_plan, moves_of)
            view = self._buffer(label).put(moves, lease)
            planned = buffers.unfilled(kv_plan.num_tokens, lease)

            def compute() -> None:
                if ctx.capture:
                    self._captured.add((label, lease))
                self._compute(kv_plan, view, planned)

            kept = GraphPositions(
                kv_plan=kv_plan,
                step=step,
                planned=planned,
                moved=moved,
                by=by,
                ids=ids,
                is_captured=(label, lease) in self._captured,
                compute=compute,
            )
            planned.head = kept
            self._kept[label, lease.slot] = kept
        kept.has_begun = False
        return kept.planned

    def discard(self, label: str, slot: int) -> None:
        """What was planned ahead on a slot is not used: its buffers may be on their way on another stream still."""
        self._kept.pop((label, slot), None)

    def bring(self, planned: Positions, counters: np.ndarray, epoch: int) -> None:
        """Before the step runs: ``counters`` int64 [streams] at ``epoch`` on the device, those of the step's rows."""
        step = planned.head
        if step is None:
            return
        if step.ids is not None:
            self.counters.put(step.kv_plan.streams, step.ids)
        else:
            assert step.kv_plan.head is not None
            self.counters.bring(step.kv_plan.head.rows.streams, counters, epoch)

    def committed(self, planned: Positions, before: int, after: int) -> None:
        """The step that runs has moved the host's counters, whose epoch went from ``before`` to ``after``."""
        step = planned.head
        if step is not None and (step.has_begun or step.is_captured):
            self.counters.moved(step.moved, step.by, before, after)

    def _buffer(self, label: str) -> StepBuffer:
        buffer = self._moves.get(label)
        if buffer is None:
            buffer = self._moves[label] = StepBuffer(torch.int32, self._info.device, self._info.num_slots)
            buffer.reserve(self._rows)
        return buffer

    def _compute(self, kv_plan: KVPlan, moves: torch.Tensor, planned: Positions) -> None:
        assert kv_plan.view is not None
        assert planned.tables is not None
        self._next_positions(
            kv_plan.view.streams,
            moves,
            self.counters.values,
            self._rotary.frequencies,
            planned.ids,
            *planned.tables,
            factor=self._rotary.factor,
            interleave=self._rotary.interleave,
        )


def _with_lengths(kv_plan: KVPlan) -> tuple[np.ndarray, np.ndarray | slice, np.ndarray]:
    """Where positions move as lengths do: by how much those of each row do, int [B]; which streams', and by how much
    each."""
    assert kv_plan.head is not None
    rows = kv_plan.head.rows
    return rows.planned[0].is_real32, rows.streams if rows.block is None else rows.block, rows.spans


def _apart(
    kv_plan: KVPlan, moves_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray | slice, np.ndarray]:
    """The same where they move by what ``moves_of`` says."""
    moves = moves_of(kv_plan.streams)
    is_real = moves != 0
    moved, by = kv_plan.streams[is_real], moves[is_real]
    block = block_of(moved) if (by == by[:1]).all() else None
    return moves, moved if block is None else block, by
