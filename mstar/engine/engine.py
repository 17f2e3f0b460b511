"""One step at a time over batches of rows: declare, admit, plan, preprocess, forward, commit, outputs."""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend, GraphBackend
from mstar.engine.accelerator_graph_runner import AcceleratorGraphRunner, autocast_of
from mstar.engine.batch import Batch, StepResult
from mstar.engine.inputs import ModelInputsFromEngine, RequestInfo
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.padding import PaddingRows
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.runner import StepRunner, build_resources
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import StepContext
from mstar.engine.rows import PlannedStep, PreparedBatch, plan_rows, prepare_batch
from mstar.engine.submodule import NodeSubmodule
from mstar.utils.errors import Unavailable

log = logging.getLogger(__name__)

__all__ = ["Batch", "Engine", "StepResult"]


@dataclass
class _Node:
    """One node's network with what it steps through.  ``slot`` rotates per node: buckets share slot buffers."""

    submodule: NodeSubmodule
    runner: AcceleratorGraphRunner
    resources: dict[str, Resource]
    slot: int = 0
    prepared: dict[str, PreparedBatch] = field(default_factory=dict)  # the last reusable batch, by walk


class Engine:
    """Runs steps of (node, walk) over the requests it was given.

    One thread calls it.  ``resources`` hold all per-request state; a request's master row is its index into them.
    ``steps`` counts steps by (node, walk), ``eager_steps`` those that no captured bucket served by
    (node, walk, reason).
    """

    def __init__(
        self,
        submodules: Mapping[str, NodeSubmodule],
        specs: Sequence[NodeResourceSpec],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        capacity: int,
        backend: GraphBackend | None = None,
        num_slots: int = 2,
    ) -> None:
        """``capacity``: most requests at one time.  ``backend`` None chooses by device.

        Raises:
            ValueError: a spec is declared twice, depends on what is missing, names an unknown node, or two
                graph configurations capture one bucket.
        """
        self.device = torch.device(device)
        self.capacity = capacity
        self.steps: Counter[tuple[str, str]] = Counter()
        self.eager_steps: Counter[tuple[str, str, str]] = Counter()
        backend = backend or (CpuGraphBackend() if self.device.type == "cpu" else EagerBackend())
        for spec in specs:
            for name in sorted(spec.nodes - submodules.keys()):
                raise ValueError(f"resource {spec.resource_key!r} names node {name!r}, which the model does not have")
        padding = PaddingRows(capacity)
        runners = {
            name: AcceleratorGraphRunner(
                name,
                submodule,
                submodule.get_accelerator_graph_configs(self.device),
                backend,
                num_slots,
                padding,
                self.device,
            )
            for name, submodule in submodules.items()
        }
        info = EngineResourceInfo(self.device, dtype, kv_dtype, capacity, padding.total, num_slots)
        self.resources: dict[str, Resource] = build_resources(specs, info)
        self._step_runner = StepRunner(self.resources, specs)
        self._nodes = {
            name: _Node(
                submodule,
                runners[name],
                {s.resource_key: self.resources[s.resource_key] for s in specs if name in s.nodes},
            )
            for name, submodule in submodules.items()
        }
        self._num_slots = num_slots
        self._requests: dict[int, RequestInfo] = {}
        self._free_rows = [-row for row in range(capacity)]  # a heap: the highest row goes out first, row 0 last
        heapq.heapify(self._free_rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Sizes the static buffers of every node, then captures or registers the buckets of each.

        Raises:
            RuntimeError: warm-up left state in a resource, or a bucket was dropped and
                MSTAR_REQUIRE_ACCELERATOR_GRAPHS is set.
        """
        for node in self._nodes.values():  # all before any capture: a later growth would move a recorded buffer
            node.runner.prepare_for_capture(node.resources, self._step_runner)
        for node in self._nodes.values():
            node.runner.capture_all()
            node.prepared.clear()  # prepared before there were buckets
        for resource in self.resources.values():
            resource.post_warmup_validate()

    @torch.inference_mode()
    def ingest(self, info: RequestInfo) -> None:
        """Takes a request: gives it a master row (``info.row``) and its state in every resource.

        Idempotent.  What a resource raises leaves nothing behind.

        Raises:
            ValueError: the id is negative (those belong to padding), or a resource refuses its parameters.
            Unavailable: all ``capacity`` rows are taken.
        """
        if info.request_id < 0:
            raise ValueError(f"request_id must be >= 0, got {info.request_id}")
        if info.request_id in self._requests:
            return
        if not self._free_rows:
            raise Unavailable(f"all {self.capacity} rows of the engine are taken")
        info.row = -heapq.heappop(self._free_rows)
        self._requests[info.request_id] = info
        try:
            for key, resource in self.resources.items():
                resource.ingest_request(info.request_id, info.row, info.resource_configs.get(key))
        except BaseException:
            self.remove(info.request_id)
            raise

    @torch.inference_mode()
    def remove(self, request_id: int) -> None:
        """Frees a request's row and all its state; unknown ids are no error."""
        info = self._requests.pop(request_id, None)
        if info is None:
            return
        for resource in self.resources.values():
            resource.remove_request(request_id, info.row)
        for node in self._nodes.values():
            node.submodule.cleanup_request(request_id)
            node.prepared.clear()  # its row may go to another request
        heapq.heappush(self._free_rows, -info.row)
        info.row = -1

    def max_batch_size(self, node: str, graph_walk: str) -> int | None:
        """Most rows of one step: the smaller of the submodule's bound and the captures'; None when neither says."""
        entry = self._nodes[node]
        bounds = (entry.submodule.max_batch_size(graph_walk), entry.runner.max_batch_size_for(graph_walk))
        return min((bound for bound in bounds if bound is not None), default=None)

    def max_packed_tokens(self, node: str, graph_walk: str) -> int | None:
        """Most tokens one captured packed step of this walk holds (more run eager); None without such captures."""
        return self._nodes[node].runner.max_packed_tokens_for(graph_walk)

    def dropped_buckets(self) -> dict[str, int]:
        """Buckets that could not be captured, by node."""
        return {name: len(node.runner.dropped_buckets) for name, node in self._nodes.items()}

    @torch.inference_mode()
    def exec(self, batch: Batch) -> StepResult:
        """One step over the batch's rows, in its order.

        A row whose inputs fail is left out and named in ``errors``.  An admission that is refused (or not ready)
        runs nothing and is reported.  An exception in declare, plan or forward fails the step's rows, commits
        nothing, and leaves the engine usable.

        Raises:
            KeyError: an unknown node, or a row that was not ingested.
        """
        node = self._nodes[batch.node]
        prepared = self._prepare(node, batch)
        if not prepared.infos:
            return StepResult(errors=dict(prepared.errors))
        slot, node.slot = node.slot, (node.slot + 1) % self._num_slots
        try:
            result = self._step(node, prepared, slot)
        except Exception as error:
            log.exception("%s/%s: a step of %d rows failed", batch.node, batch.graph_walk, len(prepared.infos))
            node.prepared.pop(batch.graph_walk, None)
            return StepResult(errors=prepared.errors | dict.fromkeys(prepared.request_ids, error))
        if prepared.errors:
            result.errors = dict(prepared.errors)
        return result

    def _prepare(self, node: _Node, batch: Batch) -> PreparedBatch:
        prepared = node.prepared.get(batch.graph_walk)
        if prepared is not None and (prepared.batch is batch or prepared.batch.request_ids == batch.request_ids):
            return prepared
        for info in batch.infos:
            if self._requests.get(info.request_id) is not info:
                raise KeyError(f"request {info.request_id} was not ingested")
        prepared = prepare_batch(node.submodule, batch)
        if prepared.is_reusable:
            node.prepared[batch.graph_walk] = prepared
        return prepared

    def _step(self, node: _Node, prepared: PreparedBatch, slot: int) -> StepResult:
        planned = prepared.by_slot.get(slot)
        if planned is None:
            planned = prepared.by_slot[slot] = plan_rows(prepared, node.submodule, node.runner, slot)
        batch, real = prepared.batch, len(prepared.infos)
        ctx = StepContext(
            graph_walk=batch.graph_walk,
            request_ids=prepared.request_ids,
            rows=planned.rows,
            spans=planned.spans,
            padded_request_ids=planned.padded_ids,
            slot=slot,
            slot_lease=planned.lease,
        )
        step = planned.step
        try:
            if step is not None:
                outcome, key = self._step_runner.admit(step, ctx)
                if not (outcome.ok and outcome.ready):
                    return StepResult(refused=outcome, failed_resource=key)
                self._step_runner.plan(step, ctx)
            output = self._forward(node, batch.graph_walk, planned, ctx)
            _check_output(output)
            if step is not None:
                self._step_runner.commit(step, ctx)
            host = _to_host(output, real)
        finally:
            if planned.pool is not None:
                planned.pool.reset(node.resources.values(), real, len(planned.padded_ids))
        self._count(batch, planned)
        lease = planned.lease
        return StepResult(
            prepared.request_ids, host, captured=lease is not None, bucket=None if lease is None else lease.bucket
        )

    def _forward(self, node: _Node, graph_walk: str, planned: PlannedStep, ctx: StepContext) -> BatchedModelOutput:
        engine_inputs = ModelInputsFromEngine(
            planned.padded_ids, node.resources, ctx, planned.infos, captured=planned.lease is not None
        )
        with autocast_of(node.submodule, self.device.type):
            tensors = node.submodule.preprocess(graph_walk, engine_inputs, planned.inputs)
            if planned.lease is None:
                return BatchedModelOutput.coerce(node.submodule.forward_batched(graph_walk, engine_inputs, **tensors))
        return node.runner.replay(planned.lease, tensors, len(planned.padded_ids))

    def _count(self, batch: Batch, planned: PlannedStep) -> None:
        self.steps[batch.node, batch.graph_walk] += 1
        if planned.eager_reason is not None:
            key = (batch.node, batch.graph_walk, planned.eager_reason)
            if key not in self.eager_steps:
                log.info("%s/%s: steps run eager: %s", *key)
            self.eager_steps[key] += 1


def _check_output(output: BatchedModelOutput) -> None:
    if output.per_rid_outputs or output.packed_outputs:
        raise TypeError("a forward returned per-request or packed outputs; steps carry row outputs only")


def _to_host(output: BatchedModelOutput, real: int) -> dict[str, np.ndarray]:
    """Stop-check buffers and row outputs of the real rows, one copy each."""
    host: dict[str, np.ndarray] = {}
    for outputs in (output.row_outputs, output.check_stop_buffers):
        for name, value in outputs.items():
            if isinstance(value, torch.Tensor):
                host[name] = value.cpu().numpy()[:real].copy()  # the next replay overwrites the original
            else:
                host[name] = np.asarray(value)
    return host
