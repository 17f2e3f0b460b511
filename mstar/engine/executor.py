"""Carries out one step on one slot: admit, plan, preprocess, forward, commit, and the way of its outputs."""

from __future__ import annotations

import logging
from collections import Counter

import torch

from mstar.engine.accelerator_graph_backend import GraphBackend
from mstar.engine.accelerator_graph_runner import autocast_of
from mstar.engine.in_flight import InFlight, Part
from mstar.engine.inputs import NodeInputs
from mstar.engine.node import EngineNode
from mstar.engine.outputs import BatchedModelOutput, RequestOutputs, split_by_request
from mstar.engine.phase_clock import PhaseClock
from mstar.engine.resources.runner import StepRunner
from mstar.engine.resources.step import StepContext
from mstar.engine.rows import PlannedStep, PreparedBatch

log = logging.getLogger(__name__)


class SpentStep(Exception):
    """A step failed with ``error`` after it began to commit, so that its rows cannot run again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Execution:
    """One step of prepared rows on one slot.  Call :meth:`admit`, then :meth:`run` or :meth:`give_up`.

    Padding rows are released on every way out of the first two.
    """

    def __init__(self, owner: StepExecutor, node: EngineNode, prepared: PreparedBatch, planned: PlannedStep, slot: int):
        self._owner = owner
        self._node = node
        self._prepared = prepared
        self._planned = planned
        self._engine_inputs = planned.inputs_from_engine(node, prepared.batch.graph_walk, slot)
        self._ctx: StepContext = self._engine_inputs.ctx

    def admit(self, in_flight: InFlight, promoted: bool = False) -> bool:
        """Whether every resource has room; else ``in_flight`` says which has not."""
        step = self._planned.step
        if step is not None:
            try:
                outcome, key = self._owner.step_runner.admit(step, self._ctx, promoted)
            except BaseException:
                self._release()
                raise
            if not (outcome.ok and outcome.ready):
                in_flight.refused, in_flight.failed_resource = outcome, key
                self._release()
                return False
        self._owner.clock.mark("admit")
        return True

    def give_up(self) -> None:
        """Instead of :meth:`run`."""
        if self._planned.step is not None:
            self._owner.step_runner.abandon(self._planned.step, self._ctx)

    def run(self, in_flight: InFlight, promoted: bool = False) -> None:
        """Plans (or completes what was planned ahead), runs the forward, commits; outputs go to ``in_flight``.

        Raises:
            SpentStep: the step's effects are in part durable.
            Exception: the plan or the forward failed; nothing was committed.
        """
        owner, node, planned, ctx = self._owner, self._node, self._planned, self._ctx
        try:
            if planned.step is None or not owner.step_runner.repeats(planned.step, ctx):
                node.wait_for_slot(ctx.slot)
            try:
                if planned.step is not None:
                    owner.step_runner.plan(planned.step, ctx, promoted)
                owner.clock.mark("plan")
                output = self._forward()
            except BaseException as error:
                self.give_up()
                if isinstance(error, Exception) and node.is_spent:
                    raise SpentStep(error) from error
                raise
            try:
                if planned.step is not None:
                    owner.step_runner.commit(planned.step, ctx)
                owner.clock.mark("commit")
                self._hand_out(output, in_flight)
            except Exception as error:
                raise SpentStep(error) from error
        finally:
            self._release()
        owner.clock.mark("collect")

    def _forward(self) -> BatchedModelOutput:
        owner, node, planned = self._owner, self._node, self._planned
        walk, engine_inputs = self._prepared.batch.graph_walk, self._engine_inputs
        inputs = planned.inputs if node.kept is None else self._with_loopback(planned)
        with autocast_of(node.submodule, owner.device_type):
            tensors = node.submodule.preprocess(walk, engine_inputs, inputs)
            owner.clock.mark("preprocess")
            node.set_region_slots(self._ctx.slot)
            if planned.lease is None:
                forward = node.submodule.forward_batched if self._prepared.can_batch else node.submodule.forward
                output = BatchedModelOutput.coerce(forward(walk, engine_inputs, **tensors))
        if planned.lease is not None:
            output = node.runner.replay(planned.lease, tensors, len(planned.padded_ids), owner.clock)
        owner.clock.mark("replay")
        return output

    def _with_loopback(self, planned: PlannedStep) -> list[NodeInputs]:
        kept, prepared = self._node.kept, self._prepared
        assert kept is not None
        inputs = list(planned.inputs)
        for i, (request_id, names) in enumerate(zip(prepared.request_ids, prepared.looped, strict=True)):
            if names:
                inputs[i] = kept.attach(request_id, inputs[i], names)
        return inputs

    def _hand_out(self, output: BatchedModelOutput, in_flight: InFlight) -> None:
        owner, node, ids = self._owner, self._node, self._prepared.request_ids
        output.row_request_ids = ids
        part = Part(owner.backend.copy_to_host(output.check_stop_buffers), len(ids))
        node.used_slot(self._ctx.slot, part)
        if node.kept is not None:
            owner.counters["host_loopback_rows"] += node.kept.keep(ids, output)
        if not output.is_rows_only or node.postprocesses:
            ids = self._route(output, in_flight, part)
        in_flight.parts.append(part)
        in_flight.request_ids += ids

    def _route(self, output: BatchedModelOutput, in_flight: InFlight, part: Part) -> tuple[int, ...]:
        """Tells routed outputs apart; rows whose ``postprocess`` raises drop out."""
        node, prepared = self._node, self._prepared
        walks = prepared.walks
        split: RequestOutputs = split_by_request(
            output,
            node.submodule,
            prepared.batch.graph_walk,
            prepared.infos,
            prepared.spans.tolist(),
            prepared.inputs,
            captured=self._planned.lease is not None,
        )
        for i, info in enumerate(prepared.infos if node.postprocesses else ()):
            try:
                split[info.request_id] = node.submodule.postprocess(walks[i], info, split[info.request_id])
            except Exception as error:
                in_flight.errors[info.request_id] = error
                part.dropped += (i,)
                del split[info.request_id]
        in_flight.outputs.update(split)
        return tuple(split)

    def _release(self) -> None:
        tail = self._planned.tail
        if tail is not None:
            tail.reset(self._node.resources.values())


class StepExecutor:
    """What every step of an engine needs.

    ``device_failure``: why the device can run nothing more, once :meth:`has_device_failed` has found that out.
    """

    def __init__(
        self,
        step_runner: StepRunner,
        backend: GraphBackend,
        device: torch.device,
        clock: PhaseClock,
        counters: Counter[str],
    ) -> None:
        self.step_runner = step_runner
        self.backend = backend
        self.device_type = device.type
        self.clock = clock
        self.counters = counters
        self.device_failure: str | None = None

    def has_device_failed(self) -> bool:
        """Asked after a failure, whether the device is to blame for good."""
        if self.device_failure is None:
            self.device_failure = self.backend.failure()
            if self.device_failure is not None:
                log.critical("the device has failed: %s", self.device_failure)
        return self.device_failure is not None
