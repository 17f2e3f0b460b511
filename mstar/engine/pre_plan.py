"""One step planned ahead while another runs, and the thread and stream on which that may happen."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from mstar.engine.node import EngineNode
from mstar.engine.resources.runner import StepRunner
from mstar.engine.rows import PlannedStep, PreparedBatch, plan_rows

log = logging.getLogger(__name__)


@dataclass
class StagedPlan:
    """A step that was admitted and planned ahead; ``ready`` is what the device reaches when the plan is in place."""

    node: EngineNode
    prepared: PreparedBatch
    planned: PlannedStep
    slot: int
    ready: torch.cuda.Event | None


class PrePlanner:
    """Holds at most one staged plan.  Every entry waits for the plan thread first, so state has one writer at a time.

    Plans touch static buffers of a slot that no step in flight uses, on a stream of their own where the device has
    streams.
    """

    def __init__(self, step_runner: StepRunner, device: torch.device, counters: Counter[str], threaded: bool) -> None:
        """``threaded``: plan on a thread, so that :meth:`start` returns at once.  ``counters`` gets ``staged``,
        ``promoted`` and ``cleared``."""
        self._step_runner = step_runner
        self._device = device
        self._counters = counters
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "mstar-plan", self._pin_device) if threaded else None
        self._pending: Future[None] | None = None
        self._staged: StagedPlan | None = None

    def start(self, node: EngineNode, prepared: PreparedBatch) -> None:
        """Plans the batch for the node's next slot.  A plan that fails or is refused is not staged: the launch meets
        the same obstacle and reports it."""
        self.clear()
        if self._thread is None:
            self._stage(node, prepared)
        else:
            self._pending = self._thread.submit(self._stage, node, prepared)

    def settle(self) -> None:
        """Waits for the plan thread."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    @property
    def prepared(self) -> PreparedBatch | None:
        """The batch that is staged, if any."""
        self.settle()
        return None if self._staged is None else self._staged.prepared

    def take(self, node: EngineNode, prepared: PreparedBatch, planned: PlannedStep, slot: int) -> bool:
        """Whether this very step is staged, which makes it the current stream's; any other staged plan is undone."""
        staged = self._staged
        if staged is None:
            return False
        is_same = staged.node is node and staged.slot == slot
        is_same = is_same and staged.prepared.batch.graph_walk == prepared.batch.graph_walk
        if not (is_same and staged.planned.is_same_step(planned)):
            self.clear()
            return False
        self._staged = None
        self._counters["promoted"] += 1
        if staged.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(staged.ready)
        return True

    def clear(self) -> None:
        """Undoes what is staged, if anything is."""
        self.settle()
        if self._staged is not None:
            self._staged = None
            self._counters["cleared"] += 1
            self._step_runner.clear()

    @torch.inference_mode()
    def _stage(self, node: EngineNode, prepared: PreparedBatch) -> None:
        slot = node.slot
        try:
            planned = prepared.by_slot.get(slot)
            if planned is None:
                planned = prepared.by_slot[slot] = plan_rows(prepared, node, slot)
            if planned.lease is None or planned.step is None:
                return  # only a slot's own buffers can be written ahead
            node.wait_for_slot(slot)
            ctx = planned.context(prepared.batch.graph_walk, slot, is_preplan=True)
            with self._on_stream():
                outcome, _ = self._step_runner.pre_admit(planned.step, ctx)
                if not (outcome.ok and outcome.ready):
                    self._step_runner.clear()
                    return
                self._step_runner.pre_plan(planned.step, ctx)
                ready = None if self._stream is None else self._stream.record_event()
        except Exception:
            log.exception("%s/%s: planning ahead failed", node.name, prepared.batch.graph_walk)
            self._step_runner.clear()
            return
        self._staged = StagedPlan(node, prepared, planned, slot, ready)
        self._counters["staged"] += 1

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _pin_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is per thread
