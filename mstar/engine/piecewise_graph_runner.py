"""Capture and replay of one inner region of a node's forward; the submodule calls the runner itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mstar.engine.accelerator_graph_backend import CapturedGraph, GraphBackend
from mstar.engine.accelerator_graph_config import (
    PiecewiseAcceleratorGraphConfig,
    PiecewiseCallInputs,
    PiecewiseCaptureShape,
    PiecewiseConfigType,
)
from mstar.engine.accelerator_graph_runner import autocast_of
from mstar.engine.bucket_table import DEFAULT_BATCH_SIZES
from mstar.engine.capture_memory import CaptureBudget
from mstar.engine.compile_mode import compile_mode_override, resolve_compile_mode
from mstar.engine.dummy_step import DummyStep
from mstar.engine.inputs import ModelInputsFromEngine, NodeInputs
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.padding import PaddingPool, PaddingRows
from mstar.engine.piecewise_output import PiecewiseOutput
from mstar.engine.resources.base import Resource
from mstar.engine.resources.runner import StepRunner
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext, SubmoduleStep
from mstar.engine.submodule import NodeSubmodule

log = logging.getLogger(__name__)

REGION_WALK = "__piecewise__"

# (bs, total_tokens)
Shape = tuple[int, int]


@dataclass
class _Capture:
    """One (shape, slot).  ``outputs`` are static, known after the first warm-up; empty where the backend keeps them."""

    shape: PiecewiseCaptureShape
    slot: int
    static: dict[str, torch.Tensor]
    engine_inputs: ModelInputsFromEngine
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    graph: CapturedGraph | None = None


class PiecewiseGraphRunner:
    """Captures one region for a grid of shapes and replays it over the engine's requests.

    The region is captured and replayed over padding rows beyond the batch's own, in the forward of an eager step.
    """

    def __init__(
        self,
        node: str,
        label: str,
        submodule: NodeSubmodule,
        config: PiecewiseAcceleratorGraphConfig,
        backend: GraphBackend,
        num_slots: int,
        padding: PaddingRows,
        device: torch.device,
        rows_of: Callable[[Sequence[int]], np.ndarray],
        memory: Any | None = None,
    ) -> None:
        """``padding`` grows by this runner's rows here, so build every runner before any resource.

        Args:
            num_slots: slots of the node; the region uses them only where a resource of its step needs two.
            rows_of: master rows int64 of requests, as they are when the region runs.
            memory: the graph pool that all regions of the node share.
        """
        self.node, self.label, self.config = node, label, config
        self.name = f"{node}_{label}"
        self.num_slots = 1
        self.dropped_buckets: list[BucketKey] = []
        self._is_packed = config.get_config_type() is PiecewiseConfigType.PACKED
        self._submodule = submodule
        self._backend = backend
        self._device_type = device.type
        self._rows_of = rows_of
        self._memory = memory
        self._slot = 0
        self.has_committed = False  # since the forward began: its step cannot be run again then
        sizes = sorted(set(config.capture_batch_sizes or DEFAULT_BATCH_SIZES))
        shapes = {(s.bs, s.total_tokens): s for s in config.get_capture_shapes(sizes)}
        self._shapes = sorted(shapes.values(), key=lambda s: (-s.bs, -s.total_tokens))
        largest = max((shape.bs for shape in self._shapes), default=0)
        self._pools: list[PaddingPool] = [
            padding.pool(f"{self.name}_slot{slot}", largest if config.declare_step is not None else 0)
            for slot in range(num_slots)
        ]
        self._mode = (
            resolve_compile_mode(self.name, compile_mode_override(), config.compile_mode)
            if config.compile and backend.compiles and not submodule.disable_torch_compile
            else None
        )
        self._capture_fn: Callable[[PiecewiseCallInputs], Any] = config.capture_fn
        self._captures: dict[Shape, list[_Capture]] = {}
        self._resources: dict[str, Resource] = {}
        self._step_runner: StepRunner | None = None
        self._ignored: set[str] = set()

    @property
    def buckets(self) -> list[BucketKey]:
        """Every declared bucket, largest first."""
        return [self._bucket(shape) for shape in self._shapes]

    @property
    def has_graphs(self) -> bool:
        return bool(self._captures)

    # Load

    def prepare_for_capture(self, resources: Mapping[str, Resource], step_runner: StepRunner) -> None:
        """Static buffers of the resources that the region's step touches; before any node captures.  Idempotent."""
        self._resources, self._step_runner = dict(resources), step_runner
        if not self._shapes or not self._backend.captures:
            return
        touched = self._touched_resources()
        if any(resource.force_double_buffer for resource in touched):
            self.num_slots = len(self._pools)
        max_bs, max_tokens = max(s.bs for s in self._shapes), max(s.total_tokens for s in self._shapes)
        for resource in touched:
            resource.build_accelerator_graph_buffers(self.buckets, max_bs, max_tokens)
        for pool in self._pools[: self.num_slots]:
            pool.ingest(self._resources.values())

    def _touched_resources(self) -> list[Resource]:
        largest = self._shapes[0]
        step = self._declare(self._pools[0].ids[: largest.bs], largest.seq_lens)
        return [] if step is None else [self._resources[key] for key in step.keys()]  # noqa: SIM118

    def measure(self, budget: CaptureBudget) -> None:
        """Runs every bucket once in eager form, largest first, where the backend budgets memory."""
        if budget.is_limited:
            for shape in self._shapes:
                self._try(
                    shape, 0, lambda made, _: budget.measure(self._budget_key(made.shape), lambda: self._run(made))
                )

    def capture_all(self, budget: CaptureBudget) -> None:
        """Captures (or registers, where the first replay captures) every shape that the budget allows, largest first.

        A shape is usable only when all its slots were captured; a failure drops it and the rest go on.
        """
        if self._backend.captures:
            if self._mode is not None:
                self._capture_fn = self._backend.compile(self.config.capture_fn, self._mode)
            for shape in self._shapes:
                if budget.allows(self._budget_key(shape)):
                    for slot in range(self.num_slots):
                        if not self._try(shape, slot, self._capture):
                            break
        self._captures = {shape: slots for shape, slots in self._captures.items() if len(slots) == self.num_slots}
        self.dropped_buckets = [self._bucket(s) for s in self._shapes if (s.bs, s.total_tokens) not in self._captures]

    def _try(self, shape: PiecewiseCaptureShape, slot: int, action: Callable[[_Capture, DummyStep], None]) -> bool:
        assert self._step_runner is not None
        lease = SlotLease(slot, self._bucket(shape))
        spans = np.array(shape.seq_lens if self.config.declare_step is not None else (), dtype=np.int64)
        flags = {"is_packed": self._is_packed, "pads_tokens": self._is_packed}
        dummy = DummyStep(lease, spans, self._pools[slot], self._resources, self._step_runner, **flags)
        try:
            with self._backend.capturing():
                dummy.plan(self._declare(dummy.ids, shape.seq_lens))
                static = self.config.make_static_inputs(shape)
                action(_Capture(shape, slot, static, dummy.engine_inputs), dummy)
        except Exception:
            log.exception("%s: capture of %s on slot %d failed", self.name, lease.bucket, slot)
            return False
        finally:
            dummy.reset(free=self._is_packed)  # padding rows of a batched region compute like real ones
        return True

    def _capture(self, capture: _Capture, dummy: DummyStep) -> None:
        if self._backend.capture_at_load:
            for _ in range(max(1, self._backend.warmup_forwards)):
                outputs = self._run(capture)
                dummy.plan_again()
            # Outside the graphs' memory: what one capture frees there, another region's replay writes.
            capture.outputs = {name: torch.empty_like(tensor) for name, tensor in outputs.row_outputs.items()}
            self._backend.synchronize()
            capture.graph = self._graph(capture)
        self._captures.setdefault((capture.shape.bs, capture.shape.total_tokens), []).append(capture)

    def _graph(self, capture: _Capture) -> CapturedGraph:
        return self._backend.capture(lambda _: self._run(capture), capture.static, capture.shape.bs, self._memory)

    def _run(self, capture: _Capture) -> BatchedModelOutput:
        """The region's body over its static inputs; its results end up in the static outputs, once there are any."""
        call = PiecewiseCallInputs(capture.static, capture.engine_inputs, self.config.forward_kwargs)
        with autocast_of(self._submodule, self._device_type):
            results = _named_tensors(self._capture_fn(call))
        if capture.outputs:
            results = {name: capture.outputs[name].copy_(tensor) for name, tensor in results.items()}
        return BatchedModelOutput(row_outputs=dict(results))

    # Steps

    def can_run(self, bs: int, total_tokens: int | None = None) -> bool:
        """Whether a captured shape holds ``bs`` rows (and, of a packed region, ``total_tokens``)."""
        return self._resolve(bs, total_tokens) is not None

    def lease_slot(self, bs: int, total_tokens: int | None = None, slot: int | None = None) -> SlotLease | None:
        """A lease of the tightest shape, by (tokens, rows); None means that the region runs eager.

        ``slot`` (modulo the number of slots) defaults to the one set last.
        """
        found = self._resolve(bs, total_tokens)
        if found is None:
            return None
        return SlotLease(
            (self._slot if slot is None else slot) % self.num_slots, self._bucket(self._captures[found][0].shape)
        )

    def early_lease(self, inputs: Sequence[NodeInputs], total_tokens: int, slot: int) -> SlotLease | None:
        """The lease that an outer step without one of its own is declared with; None unless the region asks for that.

        ``inputs``: the batch's real rows, ``total_tokens`` long together; ``slot``: the outer step's.
        """
        if not self.config.lease_before_step:
            return None
        lease = self.lease_slot(len(inputs), total_tokens, slot)
        if lease is None or self.config.can_lease is None or self.config.can_lease(list(inputs)):
            return lease
        return None

    def set_slot(self, slot: int) -> None:
        """The slot of the next replays (modulo the number of slots); right before the forward they are part of."""
        self._slot = slot % self.num_slots
        self.has_committed = False

    def run(
        self,
        static_inputs: Mapping[str, torch.Tensor],
        request_ids: Sequence[int] | None = None,
        seq_lens: Sequence[int] | None = None,
        real_bs: int | None = None,
    ) -> PiecewiseOutput:
        """Stages the inputs, declares, admits and plans the region's step, replays and commits.

        Args:
            static_inputs: by name, [rows or tokens, ...]; what a captured input has beyond them is zeroed.
            request_ids: the batch's requests; None declares nothing.
            seq_lens: new tokens of each; a packed region needs them.
            real_bs: the batch's rows; taken from the former two where they are given.

        Raises:
            ValueError: the number of rows is given by nothing, or the lengths do not fit.
            RuntimeError: no captured shape holds the batch, or a resource refuses the region's step.
        """
        if real_bs is None:
            given = request_ids if request_ids is not None else seq_lens
            if given is None:
                raise ValueError(f"{self.name}: needs request_ids, seq_lens or real_bs, got none of them")
            real_bs = len(given)
        if request_ids is not None and len(request_ids) != real_bs:
            raise ValueError(f"{self.name}: real_bs={real_bs} rows, but {len(request_ids)} request_ids")
        found = self._resolve(real_bs, None if seq_lens is None else sum(seq_lens))
        if found is None:
            raise RuntimeError(f"{self.name}: no captured shape holds {real_bs} rows of lengths {seq_lens}")
        capture = self._captures[found][self._slot]
        shape = capture.shape
        lengths = self.config.replay_seq_lens(shape, None if seq_lens is None else list(seq_lens), real_bs)
        pool = self._pools[self._slot]
        self._stage(capture, static_inputs)
        try:
            output = self._step(capture, pool, request_ids, lengths)
        finally:
            pool.reset(self._resources.values(), real_bs, shape.bs, free=self._is_packed)
        tokens = sum(lengths[:real_bs])
        return PiecewiseOutput(output.row_outputs, shape, real_bs, tokens, is_packed=self._is_packed)

    def _step(
        self, capture: _Capture, pool: PaddingPool, request_ids: Sequence[int] | None, lengths: list[int]
    ) -> BatchedModelOutput:
        bs = capture.shape.bs
        if request_ids is None or self.config.declare_step is None:
            return self._replay(capture)
        real = len(request_ids)
        ids = (*request_ids, *pool.ids[real:bs])
        ctx = StepContext(
            graph_walk=REGION_WALK,
            request_ids=tuple(request_ids),
            rows=np.concatenate([self._rows_of(request_ids), pool.rows[real:bs]]),
            spans=np.array(lengths, dtype=np.int64),
            padded_request_ids=ids,
            slot=capture.slot,
            slot_lease=SlotLease(capture.slot, self._bucket(capture.shape)),
            is_packed=self._is_packed,
            pads_tokens=self._is_packed,
        )
        step = self._declare(ids, lengths)
        if step is None:
            return self._replay(capture)
        assert self._step_runner is not None
        outcome, resource = self._step_runner.admit(step, ctx)
        if not (outcome.ok and outcome.ready):
            raise RuntimeError(f"{self.name}: resource {resource!r} refuses the region's step: {outcome.reason}")
        try:
            self._step_runner.plan(step, ctx)
            output = self._replay(capture)
        except BaseException:
            self._step_runner.abandon(step, ctx)
            raise
        self.has_committed = True
        self._step_runner.commit(step, ctx)
        return output

    def _replay(self, capture: _Capture) -> BatchedModelOutput:
        if capture.graph is None:
            capture.graph = self._graph(capture)
        return capture.graph.replay(capture.static, capture.shape.bs)

    def _stage(self, capture: _Capture, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            buffer = capture.static.get(name)
            if buffer is None:
                if name not in self._ignored:
                    self._ignored.add(name)
                    log.warning("%s: takes no input %r, ignored", self.name, name)
                continue
            n = tensor.shape[0] if tensor.dim() else 0
            if tensor.dim() == 0 or n > buffer.shape[0] or tensor.shape[1:] != buffer.shape[1:]:
                raise ValueError(
                    f"{self.name}: input {name!r} has shape {tuple(tensor.shape)}, its buffer {tuple(buffer.shape)}"
                )
            buffer[:n].copy_(tensor)
            buffer[n:].zero_()

    def _declare(self, ids: Sequence[int], lengths: Sequence[int]) -> SubmoduleStep | None:
        declare: Any = self.config.declare_step  # its ids are annotated as the API prints them
        return None if declare is None else declare(list(ids), list(lengths))

    def _resolve(self, bs: int, total_tokens: int | None) -> Shape | None:
        if self._is_packed and total_tokens is None:
            return None
        return min(
            (
                shape
                for shape in self._captures
                if shape[0] >= bs and not (self._is_packed and total_tokens is not None and shape[1] < total_tokens)
            ),
            key=lambda shape: (shape[1], shape[0]),
            default=None,
        )

    def _bucket(self, shape: PiecewiseCaptureShape) -> BucketKey:
        return BucketKey(REGION_WALK, shape.bs, shape.total_tokens, self.name)

    def _budget_key(self, shape: PiecewiseCaptureShape) -> tuple[str, BucketKey]:
        return self.name, self._bucket(shape)


def build_region_runners(
    node: str,
    submodule: NodeSubmodule,
    backend: GraphBackend,
    num_slots: int,
    padding: PaddingRows,
    device: torch.device,
    rows_of: Callable[[Sequence[int]], np.ndarray],
) -> dict[str, PiecewiseGraphRunner]:
    """A runner per region that the node declares, by label; before any resource, as ``padding`` grows."""
    configs = submodule.get_piecewise_accelerator_graph_configs(device)
    memory = backend.make_pool() if configs else None
    return {
        label: PiecewiseGraphRunner(
            node, label, submodule, config, backend, num_slots, padding, device, rows_of, memory
        )
        for label, config in configs.items()
    }


def _named_tensors(result: Any) -> Mapping[str, torch.Tensor]:
    """A bare tensor is the output "x".  TypeError for anything but tensors."""
    if isinstance(result, torch.Tensor):
        return {"x": result}
    if isinstance(result, Mapping) and all(isinstance(value, torch.Tensor) for value in result.values()):
        return result
    raise TypeError(f"a captured region returns a tensor or a dict of tensors, got {type(result).__name__}")
