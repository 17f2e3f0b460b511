"""A node whose tokens can be computed by hand, over one resource that keeps the last token and the length of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend
from mstar.engine.accelerator_graph_config import BatchedAcceleratorGraphConfig, PackedAcceleratorGraphConfig
from mstar.engine.batch import Batch
from mstar.engine.engine import Engine
from mstar.engine.inputs import ARNodeInputs, RequestInfo
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.phase_clock import PhaseClock
from mstar.engine.resources.base import Resource
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import ADMITTED, AdmitOutcome, AllocationFailed, ResourceStep, Segment, SubmoduleStep
from mstar.engine.submodule import ARNodeSubmodule

MODULUS = 101


def next_token(ids: Sequence[int]) -> int:
    """What the toy answers to the tokens of one row's step."""
    return (7 * int(sum(ids)) + len(ids)) % MODULUS


@dataclass
class ToyReqConfig(ResourceReqConfig):
    refuse: bool = False


@dataclass(frozen=True)
class ToySpec(NodeResourceSpec):
    budget: int = 10_000
    preplans: bool = False
    requests: int | None = None

    def max_requests(self) -> int | None:
        return self.requests

    @property
    def resource_class(self) -> type[Resource]:
        return ToyTokens


class ToyTokens(Resource):
    """``last`` int64 [rows] on the device, ``length`` int64 [rows] on the host; at most ``budget`` tokens at a time.

    ``fail`` maps a hook's name to what it raises.  ``cached`` is the prefix this resource holds of every prompt.
    """

    def __init__(self, spec: ToySpec, info: Any) -> None:
        self.capacity, self.budget = info.capacity, spec.budget
        self.supports_preplan = spec.preplans
        self.fail: dict[str, Exception] = {}
        self.cached: int | None = None
        self.applied: dict[int, int] = {}
        self.chains: list[tuple[list[int], list[int]]] = []
        self._staged: tuple[torch.Tensor, torch.Tensor] | None = None
        self.last = torch.zeros(info.total_rows, dtype=torch.int64, device=info.device)
        self.length = np.zeros(info.total_rows, dtype=np.int64)
        self.requests: dict[int, int] = {}
        self.calls: list[tuple[str, Any]] = []
        self._slots, self._offsets = (
            [torch.zeros(257, dtype=torch.int64, device=info.device) for _ in range(info.num_slots)] for _ in range(2)
        )

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: Any) -> ToyTokens:
        assert isinstance(spec, ToySpec)
        return cls(spec, info)

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        if isinstance(config, ToyReqConfig) and config.refuse:
            raise ValueError("refused by the toy")
        self.requests[request_id] = row
        self.length[row] = 0

    def remove_request(self, request_id: int, row: int) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.length[row] = 0

    def admit(self, step: ResourceStep, ctx: Any) -> AdmitOutcome:
        self._enter("admit", ctx)
        used = int(self.length[: self.capacity].sum()) + int(ctx.spans[: ctx.num_real].sum())
        if used > self.budget:
            return AdmitOutcome(ok=False, reason=AllocationFailed("the toy is full", used - self.budget))
        return ADMITTED

    def plan(self, step: ResourceStep, ctx: Any) -> None:
        self._enter("pre_plan" if ctx.is_preplan else "plan", ctx)
        n = ctx.rows.size
        rows = self._slots[ctx.slot][:n] if ctx.slot_lease else torch.zeros_like(self._slots[0][:n])
        rows.copy_(torch.from_numpy(ctx.rows))
        offsets = self._offsets[ctx.slot][: n + 1]
        offsets[1:].copy_(torch.from_numpy(ctx.spans.cumsum()))
        if ctx.is_preplan:
            self._staged = rows, offsets
        else:
            self.rows, self.offsets = rows, offsets

    def promote_preplan(self, step: ResourceStep, ctx: Any) -> None:
        self._enter("promote", ctx)
        assert self._staged is not None
        (self.rows, self.offsets), self._staged = self._staged, None

    def clear_preplan(self) -> None:
        self._enter("clear", None)
        self._staged = None

    def abandon(self, step: ResourceStep, ctx: Any) -> None:
        self._enter("abandon", ctx)

    def _enter(self, hook: str, ctx: Any) -> None:
        self.calls.append((hook, ctx))
        if hook in self.fail:
            raise self.fail[hook]

    def hooks(self) -> list[str]:
        """Names of the hooks called so far, then forgotten."""
        names = [name for name, _ in self.calls]
        self.calls.clear()
        return names

    def enable_prefix_cache(self, request_id: int) -> bool:
        return self.cached is not None

    def resolve_cached_prefix(self, request_id: int) -> int:
        return self.cached or 0

    def apply_cached_prefix(
        self, request_id: int, row: int, matched_len: int, matched_ids: np.ndarray | None = None
    ) -> None:
        self.applied[request_id] = matched_len

    def extend_prefix_chains(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        self.chains.append((rows.tolist(), tokens.tolist()))

    def commit(self, step: ResourceStep, ctx: Any) -> None:
        self._enter("commit", ctx)
        self.length[ctx.rows[: ctx.num_real]] += ctx.spans[: ctx.num_real]

    def reset_rows(self, request_ids: Sequence[int], rows: Sequence[int], free: bool = False) -> None:
        self.calls.append(("reset", (tuple(request_ids), tuple(rows), free)))
        self.length[list(rows)] = 0

    def build_accelerator_graph_buffers(self, buckets: Any, max_bs: int, max_seq_len: int) -> None:
        self.calls.append(("buffers", (max_bs, max_seq_len)))

    def loopback_tokens(self) -> torch.Tensor:
        return self.last[self.rows]

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.cat([x.new_zeros(1), x.cumsum(0)])
        return total[self.offsets[1:]] - total[self.offsets[:-1]]

    def spans(self) -> torch.Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    def store(self, tokens: torch.Tensor) -> None:
        self.last.index_copy_(0, self.rows, tokens)


@dataclass
class ToyOptions:
    decode_sizes: tuple[int, ...] = (1, 2, 4, 8)
    prefill_sizes: tuple[int, ...] = (1, 2, 4)
    prefill_tokens: tuple[int, ...] = (16, 64)
    decode_aliases: list[str] = field(default_factory=list)
    caps: bool = True
    key_info: Any = None
    is_routed: bool = False
    extra_configs: list[Any] = field(default_factory=list)


class ToySubmodule(ARNodeSubmodule):
    """Walks ``prefill`` (ids given), ``decode`` (token on the device) and ``mixed`` (rows of both).

    ``hook`` runs inside the forward.  With ``is_routed`` a decode row takes its token from the engine instead.
    """

    reads_device_loopback = True

    def __init__(self, options: ToyOptions | None = None) -> None:
        super().__init__()
        self.options = options or ToyOptions()
        self.hook: Any = None
        self.key_info: Any = self.options.key_info
        self.step_key_info: Any = ...
        self.forwards = 0
        self.declared = 0
        self.prepared = 0
        self.cleaned: list[int] = []

    def uniform_row_inputs(self, graph_walk: str) -> ARNodeInputs | None:
        return ARNodeInputs(input_seq_len=1) if graph_walk not in ("prefill", "mixed") else None

    def device_loopback_signals(self, graph_walk: str) -> frozenset[str]:
        return frozenset({"text_inputs"}) if graph_walk == "decode" else frozenset()

    def loopback_outputs(self) -> dict[str, str]:
        return {"text_inputs": "new_token"} if self.options.is_routed else {}

    def get_combined_graph_walks(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {"LLM": {"mixed": ("decode", "prefill")}}

    def split_inputs(self, inputs: Any, num_tokens: int) -> tuple[ARNodeInputs, ARNodeInputs]:
        parts = inputs.input_ids[:num_tokens], inputs.input_ids[num_tokens:]
        first, rest = (ARNodeInputs(input_ids=ids, input_seq_len=ids.numel()) for ids in parts)
        return first, rest

    def prepare_inputs(self, graph_walk: str, info: RequestInfo) -> ARNodeInputs | None:
        self.prepared += 1
        if info.extras.get("skip"):
            return None
        if info.extras.get("fail"):
            raise RuntimeError("bad row")
        assert info.prompt_ids is not None
        ids = torch.from_numpy(info.prompt_ids)
        return ARNodeInputs(input_ids=ids, input_seq_len=ids.numel())

    def cg_key_info(self, graph_walk: str, infos: Sequence[RequestInfo]) -> Any:
        return self.key_info

    def declare_step(self, graph_walk: str, request_ids: Any, inputs: Any, slot_lease: Any = None, **_: Any) -> Any:
        self.declared += 1
        segments = tuple(Segment(i, "main", x.input_seq_len) for i, x in zip(request_ids, inputs, strict=True))
        info = self.key_info if self.step_key_info is ... else self.step_key_info
        return SubmoduleStep({"toy": ResourceStep()}, segments, cg_key_info=info)

    def preprocess(self, graph_walk: str, engine_inputs: Any, inputs: Any) -> dict[str, Any]:
        toy = engine_inputs.resources["toy"]
        if all(x.input_ids is None for x in inputs) and not self.options.is_routed:
            return {"input_ids": toy.loopback_tokens()}
        own = [None] * len(inputs) if self.options.is_routed else toy.loopback_tokens().split(1)
        rows = [
            x.tensors.get("text_inputs", own[i]) if x.input_ids is None else x.input_ids for i, x in enumerate(inputs)
        ]
        return {"input_ids": torch.cat([row.to(toy.last.device) for row in rows])}

    def forward_batched(self, graph_walk: str, engine_inputs: Any, **tensors: Any) -> BatchedModelOutput:
        self.forwards += 1
        toy, ids = engine_inputs.resources["toy"], tensors["input_ids"]
        if self.hook is not None:
            self.hook(graph_walk, ids)
        token = (7 * toy.sum_rows(ids) + toy.spans()) % MODULUS
        toy.store(token)
        return BatchedModelOutput(check_stop_buffers={"new_token": token, "fault": token < 0})

    def cleanup_request(self, request_id: int) -> None:
        self.cleaned.append(request_id)

    def get_accelerator_graph_configs(self, device: torch.device) -> list[Any]:
        o = self.options
        decode = BatchedAcceleratorGraphConfig(
            capture_graph_walk="decode",
            single_request_inputs=ARNodeInputs({"text_inputs": torch.zeros(1, dtype=torch.int64)}, input_seq_len=1),
            replay_graph_walks=o.decode_aliases,
            capture_batch_sizes=list(o.decode_sizes),
            caps_eager_batch_size=o.caps,
            additional_key_info=o.key_info,
        )
        prefill = PackedAcceleratorGraphConfig(
            capture_graph_walk="prefill",
            replay_graph_walks=["mixed"],
            capture_token_lengths=list(o.prefill_tokens),
            make_node_input=lambda n: ARNodeInputs(input_ids=torch.zeros(n, dtype=torch.int64), input_seq_len=n),
            capture_batch_sizes=list(o.prefill_sizes),
            caps_eager_batch_size=o.caps,
            additional_key_info=o.key_info,
        )
        return [decode, prefill, *o.extra_configs]


def make_engine(
    options: ToyOptions | None = None,
    *,
    backend: Any = None,
    capacity: int = 16,
    budget: int = 10_000,
    warm: bool = True,
    preplans: bool = False,
    submodule: ToySubmodule | None = None,
    clock: PhaseClock | None = None,
    device: str = "cpu",
) -> tuple[Engine, Any, ToyTokens]:
    """An engine of one toy node; ``backend`` defaults to strict mode with warm-up forwards and captures at load."""
    submodule = submodule or ToySubmodule(options)
    backend = backend or CpuGraphBackend(warmup_forwards=2, capture_at_load=True, replays_real_head=False, strict=True)
    engine = Engine(
        {"LLM": submodule},
        [ToySpec("toy", {"LLM"}, budget, preplans)],
        device=device,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        capacity=capacity,
        backend=backend,
        clock=clock,
    )
    if warm:
        engine.warm_up()
    toy = engine.resources["toy"]
    assert isinstance(toy, ToyTokens)
    return engine, submodule, toy


def request(request_id: int, prompt: Sequence[int] = (1, 2, 3), **extras: Any) -> RequestInfo:
    return RequestInfo(request_id, prompt_ids=np.array(prompt, dtype=np.int64), extras=extras)


def generate(engine: Engine, infos: list[RequestInfo], steps: int) -> dict[int, list[int]]:
    """Prefills all rows in one step, then decodes ``steps`` times; tokens by request id."""
    tokens: dict[int, list[int]] = {info.request_id: [] for info in infos}
    decode = Batch("LLM", "decode", infos)
    for batch in [Batch("LLM", "prefill", infos)] + [decode] * steps:
        result = engine.exec(batch)
        assert not result.errors, result.errors
        for request_id, token in zip(result.request_ids, result.host["new_token"], strict=True):
            tokens[request_id].append(int(token))
    return tokens


def expected(prompt: Sequence[int], steps: int) -> list[int]:
    tokens = [next_token(prompt)]
    for _ in range(steps):
        tokens.append(next_token(tokens[-1:]))
    return tokens
