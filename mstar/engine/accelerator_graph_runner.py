"""Capture and replay of one node's forwards over static buffers and padding rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mstar.engine.accelerator_graph_backend import CapturedGraph, Forward, GraphBackend
from mstar.engine.accelerator_graph_config import AcceleratorGraphConfig, check_compile_mode
from mstar.engine.bucket_table import BucketTable, CGSlotSpec, batch_sizes
from mstar.engine.inputs import ModelInputsFromEngine, NodeInputs
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.padding import PaddingPool, PaddingRows
from mstar.engine.resources.base import Resource
from mstar.engine.resources.runner import StepRunner
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext, SubmoduleStep
from mstar.engine.static_buffers import StaticBuffers
from mstar.engine.submodule import NodeSubmodule
from mstar.utils import knobs

log = logging.getLogger(__name__)

DEFAULT_COMPILE_MODE = "max-autotune-no-cudagraphs"


@dataclass
class _Capture:
    """One (bucket, slot).  ``static`` holds views of the shared buffers and the constants baked in at capture."""

    spec: CGSlotSpec
    forward: Forward
    static: dict[str, Any]
    graph: CapturedGraph | None = None


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
        self._device_type = device.type
        self._submodule = submodule
        self._backend = backend
        self._buffers = StaticBuffers()
        self._captures: dict[BucketKey, list[_Capture]] = {}
        self._compiled: dict[int, Any] = {}
        self._padding_rows: dict[tuple[int, int, int], list[NodeInputs]] = {}
        self._compile_mode = _mode_from_environment()
        self._pools: dict[tuple[int, int], PaddingPool] = {
            (idx, slot): padding.pool(f"{node}_{idx}_slot{slot}", max(batch_sizes(config)))
            for idx, config in enumerate(self._configs)
            for slot in range(num_slots)
        }
        self._resources: dict[str, Resource] = {}
        self._step_runner: StepRunner | None = None
        self.dropped_buckets: list[BucketKey] = []

    def prepare_for_capture(self, resources: Mapping[str, Resource], step_runner: StepRunner) -> None:
        """Static buffers of every resource, sized for the largest bucket; before any node captures.  Idempotent."""
        self._resources, self._step_runner = dict(resources), step_runner
        if not self.specs or not self._backend.captures:
            return
        buckets = list(dict.fromkeys(spec.bucket for spec in self.specs))
        max_bs, max_seq_len = max(b.bs for b in buckets), max(b.num_tokens for b in buckets)
        for resource in self._resources.values():
            resource.build_accelerator_graph_buffers(buckets, max_bs, max_seq_len)

    def capture_all(self) -> None:
        """Captures (or registers, where the first replay captures) every bucket, largest first.

        A bucket is usable only when all its slots were captured; a failure drops it and the rest go on.

        Raises:
            RuntimeError: a bucket was dropped and MSTAR_REQUIRE_ACCELERATOR_GRAPHS is set.
        """
        self.unavailable = None if self._backend.captures else "device"
        if not self.specs:
            return
        if not self._backend.captures:
            log.warning("%s: this device captures no graphs, every step runs eager", self.node)
        else:
            for pool in self._pools.values():
                pool.ingest(self._resources.values())
            made: dict[BucketKey, list[_Capture]] = {}
            for spec in self.specs:
                capture = self._try_capture(spec)
                if capture is not None:
                    made.setdefault(spec.bucket, []).append(capture)
            self._captures = {key: slots for key, slots in made.items() if len(slots) == self.num_slots}
            self.registered = self._captures.keys()
        self.dropped_buckets = [key for key in self._config_of if key not in self._captures]
        self._report()

    def _try_capture(self, spec: CGSlotSpec) -> _Capture | None:
        pool, bs = self._pools[spec.config_idx, spec.slot], spec.bucket.bs
        try:
            return self._capture(spec, pool)
        except Exception:
            log.exception("%s: capture of %s on slot %d failed", self.node, spec.bucket, spec.slot)
            return None
        finally:
            pool.reset(self._resources.values(), 0, bs, free=True)

    def _capture(self, spec: CGSlotSpec, pool: PaddingPool) -> _Capture:
        key, config = spec.bucket, spec.config
        bs, walk = key.bs, key.graph_walk
        ids, rows = pool.ids[:bs], pool.rows[:bs]
        inputs = config.get_node_inputs(bs, key.num_tokens)
        lease = SlotLease(spec.slot, key)
        step = self._submodule.declare_step(walk, ids, inputs, slot_lease=lease)
        check_key_info(lease, step)
        ctx = StepContext(
            graph_walk=walk,
            request_ids=(),
            rows=rows,
            spans=np.array([row.input_seq_len for row in inputs], dtype=np.int64),
            padded_request_ids=ids,
            slot=spec.slot,
            capture=True,
            slot_lease=lease,
        )
        engine_inputs = ModelInputsFromEngine(ids, self._resources, ctx, list(pool.infos[:bs]), captured=True)
        self._admit_and_plan(step, ctx)
        static = self._submodule.preprocess(walk, engine_inputs, inputs)
        static = {name: self._intern(spec, name, value) for name, value in static.items()}
        capture = _Capture(spec, self._frozen_forward(spec, engine_inputs), static)
        if self._backend.capture_at_load:
            for _ in range(self._backend.warmup_forwards):
                capture.forward(static)
                pool.reset(self._resources.values(), 0, bs)
                self._admit_and_plan(step, ctx)
            self._backend.synchronize()
            capture.graph = self._backend.capture(capture.forward, static, bs)
        return capture

    def _admit_and_plan(self, step: SubmoduleStep | None, ctx: StepContext) -> None:
        if step is None:
            return
        assert self._step_runner is not None
        outcome, resource = self._step_runner.admit(step, ctx)
        if not (outcome.ok and outcome.ready):
            raise RuntimeError(f"resource {resource!r} admits no dummy rows: {outcome.reason}")
        self._step_runner.plan(step, ctx)

    def _frozen_forward(self, spec: CGSlotSpec, engine_inputs: ModelInputsFromEngine) -> Forward:
        """The captured method with everything but the static tensors fixed, as a real graph would have it."""
        method = self._method(spec)
        walk = spec.bucket.graph_walk

        def forward(tensors: Mapping[str, Any]) -> BatchedModelOutput:
            with autocast_of(self._submodule, self._device_type):
                return BatchedModelOutput.coerce(method(walk, engine_inputs, **tensors))

        return forward

    def _method(self, spec: CGSlotSpec) -> Any:
        method = getattr(self._submodule, spec.config.capture_forward_method)
        if not spec.config.compile or self._submodule.disable_torch_compile:
            return method
        if spec.config_idx not in self._compiled:
            mode = self._compile_mode or spec.config.compile_mode or DEFAULT_COMPILE_MODE
            self._compiled[spec.config_idx] = self._backend.compile(method, mode)
        return self._compiled[spec.config_idx]

    def _intern(self, spec: CGSlotSpec, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        largest = max(s.bucket.num_tokens for s in self.specs if s.config_idx == spec.config_idx)
        return self._buffers.intern(
            spec.config_idx, name, value, spec.bucket.num_tokens, largest, spec.config.input_seq_dims
        )

    def _report(self) -> None:
        total = len(self._config_of)
        log.info(
            "%s: %d of %d buckets, static inputs %.1f MB (%.1f MB as copies per capture)",
            self.node,
            len(self._captures),
            total,
            self._buffers.resident_bytes / 1e6,
            self._buffers.per_capture_bytes / 1e6,
        )
        if self.dropped_buckets:
            dropped = ", ".join(map(str, self.dropped_buckets))
            message = f"{self.node}: captured {len(self._captures)} of {total} buckets, dropped {dropped}"
            if knobs.require_accelerator_graphs():
                raise RuntimeError(message)
            if self._backend.captures:
                log.error(message)

    def padding_for(self, lease: SlotLease, real: int) -> tuple[PaddingPool, int]:
        """The pool and the padded batch size of a leased step with ``real`` rows."""
        idx, _ = self._config_of[lease.bucket]
        bs = real if self._runs_real_head(lease.bucket) else lease.bucket.bs
        return self._pools[idx, lease.slot], bs

    def padding_inputs(self, lease: SlotLease, count: int) -> list[NodeInputs]:
        """Template rows that pad a batch; shared between steps, so callers leave them as they are."""
        idx, config = self._config_of[lease.bucket]
        key = (idx, lease.slot, count)
        if key not in self._padding_rows:
            self._padding_rows[key] = config.get_node_inputs(count, 0) if count else []
        return self._padding_rows[key]

    def replay(self, lease: SlotLease, tensors: Mapping[str, Any], bs: int) -> BatchedModelOutput:
        """Stages what preprocess returned for ``bs`` padded rows and replays.

        Outputs are padded and valid until the next replay.

        Raises:
            RuntimeError: the names differ from those of the capture.
        """
        capture = self._captures[lease.bucket][lease.slot]
        static = self._stage(capture, tensors)
        if capture.graph is None:
            capture.graph = self._backend.capture(capture.forward, static, bs)
        return capture.graph.replay(static, bs)

    def _stage(self, capture: _Capture, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        static, idx = capture.static, capture.spec.config_idx
        if tensors.keys() != static.keys():
            raise RuntimeError(
                f"{capture.spec.bucket}: captured inputs {sorted(static)}, this step's are {sorted(tensors)}"
            )
        if self._runs_real_head(capture.spec.bucket):
            return {
                name: self._buffers.narrowed(idx, name, value) if isinstance(value, torch.Tensor) else static[name]
                for name, value in tensors.items()
            }
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                self._buffers.stage(idx, name, static[name], value)
        return static

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


def _mode_from_environment() -> str | None:
    mode = knobs.graph_compile_mode()
    try:
        return check_compile_mode(mode)
    except ValueError:
        raise ValueError(f"MSTAR_GRAPH_COMPILE_MODE={mode!r} is not a torch.compile mode") from None
