"""Capture and replay of one node's forwards over static buffers and padding rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mstar.engine.accelerator_graph_backend import CapturedGraph, Forward, GraphBackend
from mstar.engine.accelerator_graph_config import AcceleratorGraphConfig
from mstar.engine.bucket_table import BucketTable, CGSlotSpec, batch_sizes
from mstar.engine.capture_costs import CaptureCosts
from mstar.engine.capture_memory import CaptureBudget
from mstar.engine.compile_mode import compile_mode_override, resolve_compile_mode
from mstar.engine.dummy_step import DummyStep
from mstar.engine.inputs import ModelInputsFromEngine, NodeInputs
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.padding import PaddingPool, PaddingRows
from mstar.engine.phase_clock import NO_CLOCK, PhaseClock
from mstar.engine.resources.base import Resource
from mstar.engine.resources.runner import StepRunner
from mstar.engine.resources.step import BucketKey, SlotLease, SubmoduleStep
from mstar.engine.static_buffers import StaticBuffers
from mstar.engine.submodule import NodeSubmodule

log = logging.getLogger(__name__)


@dataclass
class _Capture:
    """One (bucket, slot).  ``static`` holds views of the shared buffers and the constants baked in at capture.

    ``in_place``: addresses of those inputs that lie in a resource's own buffers.  ``runs_real_head``: a replay sees
    the real tokens alone.
    """

    spec: CGSlotSpec
    forward: Forward
    static: dict[str, Any]
    in_place: dict[str, int]
    runs_real_head: bool
    graph: CapturedGraph | None = None

    def run(self) -> BatchedModelOutput:
        return self.forward(self.static)


class AcceleratorGraphRunner(BucketTable):
    """Captures and replays the whole forwards of one node.

    Rows beyond a batch's own are padding rows of the leased slot; leases and bucket keys always name the walk a
    bucket was captured under, also when the batch came under an alias.
    """

    def __init__(
        self,
        node: str,
        submodule: NodeSubmodule,
        configs: Sequence[AcceleratorGraphConfig],
        backend: GraphBackend,
        num_slots: int,
        padding: PaddingRows,
        device: torch.device,
    ) -> None:
        """``padding`` grows by this runner's rows here, so build every runner before any resource.

        Raises:
            ValueError: two configurations capture one bucket, or MSTAR_GRAPH_COMPILE_MODE is unknown.
        """
        super().__init__(node, configs, num_slots)
        self.name = node
        self.dropped_buckets: list[BucketKey] = []
        self.capture_costs = CaptureCosts(backend)
        self._device_type = device.type
        self._submodule = submodule
        self._backend = backend
        self._memory = backend.make_pool()
        self._buffers = StaticBuffers()
        self._captures: dict[BucketKey, list[_Capture]] = {}
        self._compiled: dict[int, Any] = {}
        self._padding_rows: dict[tuple[int, int, int], tuple[list[NodeInputs], np.ndarray]] = {}
        override = compile_mode_override()
        self._modes = [
            resolve_compile_mode(f"{node} ({config.capture_graph_walk})", override, config.compile_mode)
            if backend.compiles and config.compile and not submodule.disable_torch_compile
            else None
            for config in self._configs
        ]
        self._pools: dict[tuple[int, int], PaddingPool] = {
            (idx, slot): padding.pool(f"{node}_{idx}_slot{slot}", max(batch_sizes(config)))
            for idx, config in enumerate(self._configs)
            for slot in range(num_slots)
        }
        self._resources: dict[str, Resource] = {}
        self._step_runner: StepRunner | None = None

    def prepare_for_capture(self, resources: Mapping[str, Resource], step_runner: StepRunner) -> None:
        """Static buffers of every resource, sized for the largest bucket; before any node captures.  Idempotent."""
        self._resources, self._step_runner = dict(resources), step_runner
        buckets = self.buckets
        if not buckets or not self._backend.captures:
            return
        max_bs, max_seq_len = max(b.bs for b in buckets), max(b.num_tokens for b in buckets)
        for resource in self._resources.values():
            resource.build_accelerator_graph_buffers(buckets, max_bs, max_seq_len)
        for pool in self._pools.values():
            pool.ingest(self._resources.values())

    def measure(self, budget: CaptureBudget) -> None:
        """Runs every bucket once in eager form, largest first, where the backend budgets memory."""
        if not budget.is_limited or self._why_none() is not None:
            return
        for spec in self.specs:
            if spec.slot == 0:
                self._try(spec, lambda made, _: budget.measure((self.name, made.spec.bucket), made.run), eager=True)

    def capture_all(self, budget: CaptureBudget) -> None:
        """Captures (or registers, where the first replay captures) every bucket that the budget allows, largest first.

        A bucket is usable only when all its slots were captured; a failure drops it and the rest go on.
        """
        self.unavailable = self._why_none()
        if self.unavailable == "resource":
            log.warning("%s: no step is captured: %s", self.node, self._refusals())
        if self.unavailable is None:
            for spec in self.specs:
                made = len(self._captures.get(spec.bucket, ()))
                # A bucket that lost a slot is not tried any further.
                if made == spec.slot and (spec.slot > 0 or budget.allows((self.name, spec.bucket))):
                    with self.capture_costs.of(spec.bucket):
                        self._try(spec, self._capture)
        self.capture_costs.tell(self.node)
        self._captures = {key: slots for key, slots in self._captures.items() if len(slots) == self.num_slots}
        self.registered = self._captures.keys()
        self.dropped_buckets = [key for key in self.buckets if key not in self._captures]
        log.info(
            "%s: %d of %d buckets, static inputs %.1f MB (%.1f MB as copies per capture)",
            self.node,
            len(self._captures),
            len(self.buckets),
            self._buffers.resident_bytes / 1e6,
            self._buffers.per_capture_bytes / 1e6,
        )

    def _why_none(self) -> str | None:
        """Why no bucket is captured at all, as eager steps are counted by."""
        if not self._backend.captures:
            return "device"
        return "resource" if self._refusals() else None

    def _refusals(self) -> dict[str, str]:
        """Why resources, by key, cannot be captured."""
        reasons = {key: resource.not_captured_because for key, resource in self._resources.items()}
        return {key: reason for key, reason in reasons.items() if reason}

    def _try(self, spec: CGSlotSpec, action: Callable[[_Capture, DummyStep], None], eager: bool = False) -> None:
        """Runs ``action`` over the bucket's planned dummy rows, which own nothing afterwards; a failure is logged."""
        dummy: DummyStep | None = None
        try:
            with self._backend.capturing():
                inputs = spec.config.get_node_inputs(spec.bucket.bs, spec.bucket.num_tokens)
                dummy = self._dummy_step(spec, inputs)
                action(self._prepare(spec, dummy, inputs, eager), dummy)
        except Exception:
            log.exception("%s: capture of %s on slot %d failed", self.node, spec.bucket, spec.slot)
        finally:
            if dummy is not None:
                dummy.reset(free=True)

    def _capture(self, capture: _Capture, dummy: DummyStep) -> None:
        if self._backend.capture_at_load:
            for _ in range(self._backend.warmup_forwards):
                capture.run()
                dummy.plan_again()
            self._backend.synchronize()
            bs = capture.spec.bucket.bs
            capture.graph = self._backend.capture(capture.forward, capture.static, bs, self._memory)
            dummy.plan_again()
            capture.graph.replay(capture.static, bs)  # a graph goes to the device with its first replay
            self._backend.synchronize()
        self._captures.setdefault(capture.spec.bucket, []).append(capture)

    def _dummy_step(self, spec: CGSlotSpec, inputs: Sequence[NodeInputs]) -> DummyStep:
        assert self._step_runner is not None
        lease = SlotLease(spec.slot, spec.bucket)
        is_packed, pads_tokens = self.context_flags(lease)
        return DummyStep(
            lease,
            np.array([row.input_seq_len for row in inputs], dtype=np.int64),
            self._pools[spec.config_idx, spec.slot],
            self._resources,
            self._step_runner,
            is_packed=is_packed,
            pads_tokens=pads_tokens,
        )

    def _prepare(self, spec: CGSlotSpec, dummy: DummyStep, inputs: list[NodeInputs], eager: bool) -> _Capture:
        """Plans the dummy rows and gives what preprocess returned its static buffers."""
        walk, lease = spec.bucket.graph_walk, dummy.lease
        step = self._submodule.declare_step(walk, dummy.ids, inputs, slot_lease=lease)
        check_key_info(lease, step)
        dummy.plan(step)
        static = self._submodule.preprocess(walk, dummy.engine_inputs, inputs)
        in_place = {name: static[name].data_ptr() for name in self._submodule.static_inputs(walk) & static.keys()}
        static = {
            name: value if name in in_place else self._intern(spec, name, value) for name, value in static.items()
        }
        method = self._eager_method(spec) if eager else self._method(spec)
        forward = self._frozen_forward(walk, method, dummy.engine_inputs)
        return _Capture(spec, forward, static, in_place, self._runs_real_head(spec.bucket))

    def _frozen_forward(self, walk: str, method: Any, engine_inputs: ModelInputsFromEngine) -> Forward:
        """A method with everything but the static tensors fixed, as a real graph would have it."""

        def forward(tensors: Mapping[str, Any]) -> BatchedModelOutput:
            with autocast_of(self._submodule, self._device_type):
                return BatchedModelOutput.coerce(method(walk, engine_inputs, **tensors))

        return forward

    def _method(self, spec: CGSlotSpec) -> Any:
        """The method to capture, compiled once per configuration: its slots and buckets share it."""
        mode = self._modes[spec.config_idx]
        if mode is None:
            return self._eager_method(spec)
        if spec.config_idx not in self._compiled:
            self._compiled[spec.config_idx] = self._backend.compile(self._eager_method(spec), mode)
        return self._compiled[spec.config_idx]

    def _eager_method(self, spec: CGSlotSpec) -> Any:
        return getattr(self._submodule, spec.config.capture_forward_method)

    def _intern(self, spec: CGSlotSpec, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        largest = max(s.bucket.num_tokens for s in self.specs if s.config_idx == spec.config_idx)
        return self._buffers.intern(
            spec.config_idx, name, value, spec.bucket.num_tokens, largest, spec.config.input_seq_dims
        )

    def context_flags(self, lease: SlotLease | None) -> tuple[bool, bool]:
        """``is_packed`` and ``pads_tokens`` of the context of a step under ``lease``."""
        if lease is None or not self._is_packed(lease.bucket):
            return False, False
        return True, not self._backend.replays_real_head

    def padding_for(self, lease: SlotLease, real: int) -> tuple[PaddingPool, int]:
        """The pool and the padded batch size of a leased step with ``real`` rows."""
        idx, _ = self._config_of[lease.bucket]
        bs = real if self._runs_real_head(lease.bucket) else lease.bucket.bs
        return self._pools[idx, lease.slot], bs

    def padding_inputs(self, lease: SlotLease, count: int) -> tuple[list[NodeInputs], np.ndarray]:
        """Template rows that pad a batch, and their lengths int64 [count]; shared between steps, so callers leave them
        as they are."""
        idx, config = self._config_of[lease.bucket]
        key = (idx, lease.slot, count)
        padding = self._padding_rows.get(key)
        if padding is None:
            rows = config.get_node_inputs(count, 0) if count else []
            spans = np.array([row.input_seq_len for row in rows], np.int64)
            padding = self._padding_rows[key] = rows, spans
        return padding

    def replay(
        self, lease: SlotLease, tensors: Mapping[str, Any], bs: int, clock: PhaseClock = NO_CLOCK
    ) -> BatchedModelOutput:
        """Stages what preprocess returned for ``bs`` padded rows and replays.  ``clock`` is told when all is staged.

        Outputs are padded and valid until the next replay.

        Raises:
            RuntimeError: the names differ from those of the capture, or a static input lies elsewhere.
        """
        capture = self._captures[lease.bucket][lease.slot]
        static = self._stage(capture, tensors)
        clock.mark("stage")
        if capture.graph is None:
            capture.graph = self._backend.capture(capture.forward, static, bs, self._memory)
        return capture.graph.replay(static, bs)

    def _stage(self, capture: _Capture, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        static, idx = capture.static, capture.spec.config_idx
        if tensors.keys() != static.keys():
            raise RuntimeError(
                f"{capture.spec.bucket}: captured inputs {sorted(static)}, this step's are {sorted(tensors)}"
            )
        for name, address in capture.in_place.items():
            if tensors[name].data_ptr() != address:
                raise RuntimeError(f"{capture.spec.bucket}: static input {name!r} has moved since the capture")
        if capture.runs_real_head:
            return {name: self._head(capture, name, value) for name, value in tensors.items()}
        for name, value in tensors.items():
            if name not in capture.in_place and isinstance(value, torch.Tensor):
                self._buffers.stage(idx, name, static[name], value)
        return static

    def _head(self, capture: _Capture, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return capture.static[name]
        return value if name in capture.in_place else self._buffers.narrowed(capture.spec.config_idx, name, value)

    def _runs_real_head(self, key: BucketKey) -> bool:
        return self._backend.replays_real_head and self._is_packed(key)


def check_key_info(lease: SlotLease, step: SubmoduleStep | None) -> None:
    """Raises RuntimeError when a step declares another capture variant than the one leased."""
    if step is not None and step.cg_key_info != lease.bucket.cg_key_info:
        raise RuntimeError(
            f"the declared step has cg_key_info={step.cg_key_info!r}, the leased bucket {lease.bucket.cg_key_info!r}"
        )


def autocast_of(submodule: NodeSubmodule, device_type: str) -> AbstractContextManager[Any]:
    """The node's autocast; off for a node that names no dtype."""
    dtype = submodule.autocast_dtype
    if dtype is None and not torch.is_autocast_enabled(device_type):
        return nullcontext()  # entering an autocast costs several microseconds a step
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)
