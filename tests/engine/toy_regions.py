"""A toy node whose forward is eager around captured regions: one packed that owns the toy resource, one batched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend
from mstar.engine.accelerator_graph_config import PiecewiseBatchedConfig, PiecewisePackedConfig
from mstar.engine.engine import Engine
from mstar.engine.inputs import ARNodeInputs
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.resources.step import ResourceStep, Segment, SubmoduleStep

from .toy import MODULUS, ToyOptions, ToySpec, ToySubmodule

WIDTH = 3  # entries of a row of the batched region


@dataclass
class RegionOptions:
    """``early``: the packed region is leased before the step is declared, where ``can_lease`` allows it."""

    early: bool = True
    can_lease: Any = None
    sizes: tuple[int, ...] = (1, 2, 4)
    tokens: tuple[int, ...] = (16, 32)
    hook: Any = None  # runs inside the packed region's body
    seen: list[Any] = field(default_factory=list)  # what that body was called with


class RegionSubmodule(ToySubmodule):
    """Walk ``score``: a row's token is that of its prompt, as in ``prefill``, made in region ``core``; region ``side``
    doubles rows of ``WIDTH`` numbers.  ``took`` says which path each forward took."""

    def __init__(self, options: RegionOptions) -> None:
        super().__init__(ToyOptions(decode_sizes=(1,), prefill_sizes=(1,), prefill_tokens=(16,), caps=False))
        self.region = options
        self.took: list[str] = []
        self.steps: list[SubmoduleStep] = []

    def uniform_row_inputs(self, graph_walk: str) -> ARNodeInputs | None:
        return None if graph_walk == "score" else super().uniform_row_inputs(graph_walk)

    def declare_step(
        self, graph_walk: str, request_ids: Any, inputs: Any, slot_lease: Any = None, piecewise_leases: Any = None
    ) -> Any:
        step = super().declare_step(graph_walk, request_ids, inputs, slot_lease)
        if "core" in (piecewise_leases or {}):
            step = SubmoduleStep({}, step.segments)
        self.steps.append(step)
        return step

    def forward_batched(self, graph_walk: str, engine_inputs: Any, **tensors: Any) -> BatchedModelOutput:
        if graph_walk != "score":
            return super().forward_batched(graph_walk, engine_inputs, **tensors)
        ids, ctx = tensors["input_ids"], engine_inputs.ctx
        lens = ctx.spans.tolist()
        if "core" in ctx.piecewise_leases:
            self.took.append("region")
            token = engine_inputs.piecewise["core"].run({"x": ids}, engine_inputs.request_ids, lens)["token"]
        else:
            self.took.append("eager")
            token = self._core(engine_inputs.resources["toy"], ids)["token"]
        return BatchedModelOutput(check_stop_buffers={"new_token": token})

    def _core(self, toy: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        token = (7 * toy.sum_rows(x) + toy.spans()) % MODULUS
        toy.store(token)
        return {"token": token, "doubled": x * 2}

    def _captured_core(self, call: Any) -> dict[str, torch.Tensor]:
        self.region.seen.append(call)
        if self.region.hook is not None:
            self.region.hook(call)
        return self._core(call.resources["toy"], call.static_inputs["x"])

    def get_piecewise_accelerator_graph_configs(self, device: torch.device) -> dict[str, Any]:
        def declare(request_ids: Sequence[int], seq_lens: Sequence[int]) -> SubmoduleStep:
            segments = tuple(Segment(i, "main", n) for i, n in zip(request_ids, seq_lens, strict=True))
            return SubmoduleStep({"toy": ResourceStep()}, segments)

        o = self.region
        core = PiecewisePackedConfig(
            capture_fn=self._captured_core,
            make_static_inputs=lambda shape: {"x": torch.zeros(shape.total_tokens, dtype=torch.int64, device=device)},
            declare_step=declare,
            lease_before_step=o.early,
            can_lease=o.can_lease,
            capture_batch_sizes=list(o.sizes),
            total_tokens=list(o.tokens),
            forward_kwargs={"scale": 2},
        )
        side = PiecewiseBatchedConfig(
            capture_fn=lambda call: call.static_inputs["x"] * 2 + 1,
            make_static_inputs=lambda shape: {"x": torch.zeros(shape.bs, WIDTH, device=device)},
            capture_batch_sizes=list(o.sizes),
            seq_len=WIDTH,
        )
        return {"core": core, "side": side}


def make_regions(
    options: RegionOptions | None = None,
    *,
    backend: Any = None,
    budget: int = 10_000,
    device: str = "cpu",
    submodule: RegionSubmodule | None = None,
) -> Any:
    """Engine, submodule, toy resource; strict, warmed up and captured at load unless ``backend`` says otherwise."""
    submodule = submodule or RegionSubmodule(options or RegionOptions())
    engine = Engine(
        {"LLM": submodule},
        [ToySpec("toy", {"LLM"}, budget)],
        device=device,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        capacity=16,
        backend=backend
        or CpuGraphBackend(warmup_forwards=2, capture_at_load=True, replays_real_head=False, strict=True),
    )
    engine.warm_up()
    return engine, submodule, engine.resources["toy"]
