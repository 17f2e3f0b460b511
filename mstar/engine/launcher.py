"""How a batch becomes a step: prepared once while its rows stay, planned ahead, run together or row by row."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from mstar.engine.batch import Batch
from mstar.engine.executor import Execution, SpentStep, StepExecutor
from mstar.engine.in_flight import InFlight
from mstar.engine.node import EngineNode
from mstar.engine.pre_plan import PrePlanner
from mstar.engine.requests import RequestTable
from mstar.engine.rows import PlannedStep, PreparedBatch, plan_rows, prepare_batch

log = logging.getLogger(__name__)

# Reasons that say that something is wrong; the others come with the model or the device.
_LEVEL_OF = dict.fromkeys(("dropped", "key_info", "retry"), logging.WARNING)


class Launcher:
    """Launches steps and has them planned ahead.  The planner has settled before either is called."""

    def __init__(
        self,
        nodes: Mapping[str, EngineNode],
        requests: RequestTable,
        executor: StepExecutor,
        planner: PrePlanner,
        steps: Counter[tuple[str, str]],
        eager_steps: Counter[tuple[str, str, str]],
    ) -> None:
        """``steps`` and ``eager_steps`` are counted into."""
        self._nodes = nodes
        self._requests = requests
        self._executor = executor
        self._planner = planner
        self._steps = steps
        self._eager_steps = eager_steps

    def launch(self, batch: Batch) -> InFlight:
        """As :meth:`mstar.engine.engine.Engine.launch`."""
        node = self._nodes[batch.node]
        in_flight = InFlight(batch)
        prepared = self._kept(node, batch)
        if prepared is None:
            self._check_rows(batch)
            try:
                prepared = self._prepare(node, batch)
            except Exception as error:
                self._fail(in_flight, batch.request_ids, error)
                return in_flight
        if prepared.errors:
            in_flight.errors.update(prepared.errors)
        if prepared.infos:
            self._launch(node, prepared, in_flight)
        return in_flight

    def pre_plan(self, batch: Batch) -> None:
        """As :meth:`mstar.engine.engine.Engine.pre_plan`."""
        node = self._nodes[batch.node]
        prepared = self._kept(node, batch)
        if prepared is None:
            self._check_rows(batch)
            try:
                prepared = self._prepare(node, batch)
            except Exception:
                log.exception("%s/%s: planning ahead failed", batch.node, batch.graph_walk)
                return
        if prepared.infos and not prepared.errors:
            self._planner.start(node, prepared)
        self._executor.clock.mark("plan")

    def can_queue(self, batch: Batch) -> bool:
        """As :meth:`mstar.engine.engine.Engine.can_queue`."""
        node = self._nodes[batch.node]
        prepared = self._kept(node, batch)
        planned = None if prepared is None else prepared.by_slot.get(node.slot)
        if planned is None or planned.step is None or planned.engine_inputs is None:
            return False
        return self._executor.step_runner.repeats(planned.step, planned.engine_inputs.ctx)

    def _check_rows(self, batch: Batch) -> None:
        missing = self._requests.missing(batch)
        if missing is not None:
            raise KeyError(f"request {missing.request_id} was not ingested")

    def _kept(self, node: EngineNode, batch: Batch) -> PreparedBatch | None:
        """What was prepared of these very rows, if that still holds."""
        for prepared in node.prepared.get(batch.graph_walk, ()):
            if prepared.batch is batch or prepared.batch.request_ids == batch.request_ids:
                return prepared
        staged = self._planner.prepared
        return staged if staged is not None and staged.batch is batch else None

    def _prepare(self, node: EngineNode, batch: Batch) -> PreparedBatch:
        prepared = prepare_batch(node, batch, self._requests.cached if node.caches_prefix else {})
        if prepared.is_reusable:
            node.prepared[batch.graph_walk] = [prepared, *node.prepared.get(batch.graph_walk, ())[:1]]
        return prepared

    def _launch(self, node: EngineNode, prepared: PreparedBatch, in_flight: InFlight) -> None:
        """One step over all rows together, or row by row where they cannot be batched or failed together."""
        batch, slot = prepared.batch, node.slot
        try:
            planned = prepared.by_slot.get(slot)
            if planned is None:
                planned = prepared.by_slot[slot] = plan_rows(prepared, node, slot)
        except Exception as error:
            node.prepared.pop(batch.graph_walk, None)
            self._fail(in_flight, prepared.request_ids, error)
            return
        try:
            if planned.lease is None and not prepared.can_batch and len(prepared.infos) > 1:
                self._run_each(node, prepared, in_flight, planned.eager_reason or "no_capture")
            else:
                self._run_together(node, prepared, planned, node.take_slot(), in_flight)
        except SpentStep as spent:
            self._fail(in_flight, prepared.request_ids, spent.error)
        except Exception as error:
            if self._executor.has_device_failed() or len(prepared.infos) == 1:
                self._fail(in_flight, prepared.request_ids, error)
            else:
                log.exception("%s/%s: a step failed, its rows run alone", batch.node, batch.graph_walk)
                self._executor.counters["retried_steps"] += 1
                self._run_each(node, prepared, in_flight, "retry")
        cached = self._requests.cached
        if cached and node.caches_prefix:
            for request_id in in_flight.request_ids:
                cached.pop(request_id, None)

    def _run_together(
        self, node: EngineNode, prepared: PreparedBatch, planned: PlannedStep, slot: int, in_flight: InFlight
    ) -> None:
        promoted = self._planner.take(node, prepared, planned, slot)
        self._executor.clock.mark("declare")
        try:
            execution = Execution(self._executor, node, prepared, planned, slot)
            if execution.admit(in_flight, promoted):
                execution.run(in_flight, promoted)
                promoted = False
        finally:
            if promoted:
                self._executor.step_runner.clear()  # refused or failed before the staged plan was used up
        if in_flight.refused is None:
            in_flight.captured = planned.lease is not None
            in_flight.bucket = None if planned.lease is None else planned.lease.bucket
            self._count(prepared.batch, planned.eager_reason)

    def _run_each(self, node: EngineNode, prepared: PreparedBatch, in_flight: InFlight, reason: str) -> None:
        """The rows one by one, eager, each on a slot of its own.  All are admitted first, so that a refusal stops the
        batch before any forward; a row that raises fails alone."""
        self._planner.clear()
        admitted: list[tuple[int, Execution]] = []
        for i, request_id in enumerate(prepared.request_ids):
            alone, slot = prepared.alone(i), node.take_slot()
            try:
                planned = plan_rows(alone, node, slot, reason)
                self._executor.clock.mark("declare")
                execution = Execution(self._executor, node, alone, planned, slot)
                if not execution.admit(in_flight):
                    for _, other in reversed(admitted):
                        other.give_up()
                    return
                admitted.append((request_id, execution))
            except Exception as error:
                self._fail(in_flight, (request_id,), error)
        for request_id, execution in admitted:
            try:
                execution.run(in_flight)
            except SpentStep as spent:
                self._fail(in_flight, (request_id,), spent.error)
            except Exception as error:
                self._fail(in_flight, (request_id,), error)
        self._count(prepared.batch, reason)

    def _fail(self, in_flight: InFlight, request_ids: Sequence[int], error: Exception) -> None:
        batch = in_flight.batch
        log.error("%s/%s: %d rows failed", batch.node, batch.graph_walk, len(request_ids), exc_info=error)
        in_flight.errors.update(dict.fromkeys(request_ids, error))
        self._executor.has_device_failed()

    def _count(self, batch: Batch, eager_reason: str | None) -> None:
        self._steps[batch.node, batch.graph_walk] += 1
        if eager_reason is not None:
            key = (batch.node, batch.graph_walk, eager_reason)
            if key not in self._eager_steps:
                log.log(_LEVEL_OF.get(eager_reason, logging.INFO), "%s/%s: steps run eager: %s", *key)
            self._eager_steps[key] += 1
