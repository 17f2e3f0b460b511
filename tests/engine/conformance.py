"""A small transformer over the real resources that uses what text models have no use for: two-label guided decoding
with forks, block positions, and captured regions.  Its dense twin computes the same tokens without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mstar.engine.accelerator_graph_backend import CpuGraphBackend
from mstar.engine.accelerator_graph_config import (
    BatchedAcceleratorGraphConfig,
    PackedAcceleratorGraphConfig,
    PiecewiseBatchedConfig,
    PiecewisePackedConfig,
)
from mstar.engine.batch import Batch
from mstar.engine.engine import Engine
from mstar.engine.inputs import ARNodeInputs, RequestInfo
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.resources.attention.config import AttentionSpec, AttentionStep
from mstar.engine.resources.kv.config import Fork, KVReqConfig, KVStep, PagedKVConfig, PagedKVSpec
from mstar.engine.resources.positions.config import PositionConfig, PositionSpec, PositionStep
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.step import Segment, SubmoduleStep
from mstar.engine.submodule import ARNodeSubmodule

LAYERS, HEADS, DIM, VOCAB = 2, 2, 16, 61
WIDTH = HEADS * DIM
GUIDANCE = 1.5
OTHER, BOTH = "uncond", "both"
PROMPT_WALKS = ("prefill", "guided_prefill")


@dataclass(frozen=True)
class FamilyOptions:
    """``blocks``: a prompt is one block, its tokens at one position and seeing each other.  ``regions``: the decoder
    layers of a prompt step and the head of every step are captured regions of an eager forward."""

    blocks: bool = False
    regions: bool = False
    can_lease: Callable[[Sequence[Any]], bool] | None = None


class Family(ARNodeSubmodule):
    """Walks ``prefill`` and ``decode``; ``guided_prefill`` forks the prompt's stream into a second label, and
    ``guided`` decodes both at once, the second one's input being the next higher id."""

    def __init__(self, options: FamilyOptions) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options = options
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.paths: list[str] = []  # which way each forward's Python took

    # Rows

    def uniform_row_inputs(self, graph_walk):
        return None if graph_walk in PROMPT_WALKS else ARNodeInputs(input_seq_len=1)

    def prepare_inputs(self, graph_walk, info):
        return ARNodeInputs(input_ids=torch.from_numpy(info.prompt_ids), input_seq_len=info.prompt_ids.size)

    def declare_step(self, graph_walk, request_ids, inputs, slot_lease=None, piecewise_leases=None):
        lengths = [row.input_seq_len for row in inputs]
        main = tuple(Segment(i, "main", n) for i, n in zip(request_ids, lengths, strict=True))
        if "layers" in (piecewise_leases or {}):
            return SubmoduleStep({"sampler": SamplerStep()}, main)
        forks, combined, segments = (), {}, main
        if graph_walk == "guided_prefill":
            forks = tuple(Fork(i, "main", OTHER) for i in request_ids if i >= 0)
        if graph_walk == "guided":
            combined = {("main", OTHER): BOTH}
            segments = main + tuple(Segment(i, OTHER, 1) for i in request_ids)
        steps = {
            "kv_cache": KVStep(combined_labels=combined, post_forks=forks),
            "attn": AttentionStep(causal=self._causal(graph_walk)),
            "rope": PositionStep(post_forks=forks),
            "sampler": SamplerStep(segments=main),
        }
        return SubmoduleStep(steps, segments)

    def _causal(self, graph_walk):
        return not (self.options.blocks and graph_walk in PROMPT_WALKS)

    # Forward

    def preprocess(self, graph_walk, engine_inputs, inputs):
        if graph_walk in PROMPT_WALKS:
            return {"input_ids": torch.cat([row.input_ids for row in inputs])}
        return {"input_ids": engine_inputs.resources["sampler"].loopback_tokens()}

    def layers(self, x: torch.Tensor, attend: Any) -> torch.Tensor:
        for layer in self.qkv:
            q, k, v = layer(x).view(-1, 3, HEADS, DIM).unbind(1)
            x = x + attend(q, k, v).reshape(x.shape)
        return x

    def cached_layers(self, x: torch.Tensor, resources: Any, label: str = "main") -> torch.Tensor:
        attn, rope = resources["attn"], resources["rope"]
        return self.layers(x, lambda q, k, v: attn.attend(*rope.rotate(q, k, label=label), v, label=label))

    def forward_batched(self, graph_walk, engine_inputs, **tensors):
        resources, ids = engine_inputs.resources, tensors["input_ids"]
        attn = resources["attn"]
        if graph_walk == "guided":
            x = self.cached_layers(self.embed(torch.cat([ids, (ids + 1) % VOCAB])), resources, BOTH)
            main, other = self.head(attn.last_rows(x, label=BOTH)).chunk(2)
            logits = other + GUIDANCE * (main - other)
        else:
            logits = self._head(engine_inputs, self._last_rows(graph_walk, engine_inputs, self.embed(ids)))
        tokens = resources["sampler"].sample(logits)
        return BatchedModelOutput(check_stop_buffers={"new_token": tokens, "fault": resources["sampler"].faults()})

    def _last_rows(self, graph_walk: str, engine_inputs: Any, x: torch.Tensor) -> torch.Tensor:
        ctx, resources = engine_inputs.ctx, engine_inputs.resources
        if "layers" not in ctx.piecewise_leases:
            self.paths.append("plain")
            return resources["attn"].last_rows(self.cached_layers(x, resources))
        self.paths.append("region")
        region = engine_inputs.piecewise["layers"]
        x = region.run({"x": x}, engine_inputs.request_ids, ctx.spans.tolist()).get_view("x")
        return x[torch.from_numpy(np.cumsum(ctx.spans) - 1)]

    def _head(self, engine_inputs: Any, x: torch.Tensor) -> torch.Tensor:
        region = engine_inputs.piecewise.get("head")
        if region is None or engine_inputs.captured or not region.can_run(x.shape[0]):
            return self.head(x)
        return region.run({"x": x}, real_bs=x.shape[0])["x"]

    # Captures

    def get_accelerator_graph_configs(self, device):
        guided = BatchedAcceleratorGraphConfig(
            "guided", ARNodeInputs(), capture_batch_sizes=[1, 2, 4], total_tokens_multiplier=2
        )
        if self.options.regions:
            return [guided]
        decode = BatchedAcceleratorGraphConfig("decode", ARNodeInputs(), capture_batch_sizes=[1, 2, 4])
        prefill = PackedAcceleratorGraphConfig(
            "prefill", [16, 48], dummy_prompt, replay_graph_walks=["guided_prefill"], capture_batch_sizes=[1, 2, 4]
        )
        return [guided, decode, prefill]

    def get_piecewise_accelerator_graph_configs(self, device):
        if not self.options.regions:
            return {}

        def declare(request_ids, seq_lens):
            segments = tuple(Segment(i, "main", n) for i, n in zip(request_ids, seq_lens, strict=True))
            causal = AttentionStep(causal=self._causal("prefill"))
            return SubmoduleStep({"kv_cache": KVStep(), "attn": causal, "rope": PositionStep()}, segments)

        layers = PiecewisePackedConfig(
            capture_fn=lambda call: self.cached_layers(call.static_inputs["x"], call.resources),
            make_static_inputs=lambda shape: {"x": torch.zeros(shape.total_tokens, WIDTH)},
            declare_step=declare,
            lease_before_step=True,
            can_lease=self.options.can_lease,
            capture_batch_sizes=[1, 2, 4],
            total_tokens=[4, 16],
        )
        head = PiecewiseBatchedConfig(
            capture_fn=lambda call: self.head(call.static_inputs["x"]),
            make_static_inputs=lambda shape: {"x": torch.zeros(shape.bs, WIDTH)},
            capture_batch_sizes=[1, 2, 4],
            seq_len=1,
        )
        return {"layers": layers, "head": head}

    # The dense twin

    @torch.inference_mode()
    def dense_logits(self, ids: Sequence[int], block: int = 0) -> torch.Tensor:
        """Logits [vocabulary] after ``ids``, the first ``block`` of which stand at position 0 and see each other."""
        n, ahead = len(ids), max(block - 1, 0)
        positions = (torch.arange(n) - ahead).clamp(min=0)
        seen = (torch.arange(n)[:, None] >= torch.arange(n)) | (torch.arange(n) < block)
        angle = positions[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = (f(angle).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))

        def attend(q, k, v):
            q, k = (t * cos + torch.cat([-t[..., DIM // 2 :], t[..., : DIM // 2]], -1) * sin for t in (q, k))
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)

        return self.head(self.layers(self.embed(torch.tensor(list(ids))), attend)[-1])

    def dense_tokens(self, prompt: Sequence[int], steps: int) -> list[int]:
        """Greedy tokens of ``prefill`` and ``decode``."""
        ids, block = list(prompt), len(prompt) if self.options.blocks else 0
        for _ in range(steps):
            ids.append(int(self.dense_logits(ids, block).argmax()))
        return ids[len(prompt) :]

    def dense_guided_tokens(self, prompt: Sequence[int], steps: int) -> list[int]:
        """Greedy tokens of ``guided_prefill`` and ``guided``."""
        block = len(prompt) if self.options.blocks else 0
        tokens = [int(self.dense_logits(prompt, block).argmax())]
        while len(tokens) < steps:
            main = self.dense_logits([*prompt, *tokens], block)
            other = self.dense_logits([*prompt, *((t + 1) % VOCAB for t in tokens)], block)
            tokens.append(int((other + GUIDANCE * (main - other)).argmax()))
        return tokens


def dummy_prompt(length: int) -> ARNodeInputs:
    return ARNodeInputs(input_ids=torch.zeros(length, dtype=torch.int64), input_seq_len=length)


def strict_backend() -> CpuGraphBackend:
    """As a device does it: warm-ups and captures at load, packed replays padded with tokens."""
    return CpuGraphBackend(warmup_forwards=2, capture_at_load=True, replays_real_head=False, strict=True)


def make_family(
    options: FamilyOptions | None = None, backend: Any = None, *, pages: int = 96, offload_pages: int = 0
) -> tuple[Engine, Family]:
    """An engine of the family, warmed up."""
    family, nodes = Family(options or FamilyOptions()), {"LLM"}
    kv = PagedKVConfig(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        max_seq_len=96,
        max_num_pages=pages,
        page_size=4,
        cpu_offload_pages=offload_pages,
        prefix_cache=False,
    )
    engine = Engine(
        {"LLM": family},
        [
            SamplerSpec("sampler", nodes, VOCAB),
            PagedKVSpec("kv_cache", nodes, kv),
            AttentionSpec("attn", nodes),
            PositionSpec("rope", nodes, PositionConfig(scheme="block" if family.options.blocks else "sequential")),
        ],
        device="cpu",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        capacity=6,
        backend=backend or strict_backend(),
    )
    engine.warm_up()
    return engine, family


def ingest(
    engine: Engine, prompts: dict[int, list[int]], sampling: SamplingReqConfig | None = None
) -> list[RequestInfo]:
    """Requests by id, greedy unless told otherwise."""
    infos = []
    for request_id, prompt in prompts.items():
        ids = np.array(prompt, dtype=np.int64)
        kv = KVReqConfig(prompt_tokens=ids.size, prompt_ids=ids, needed_labels={None: ("main", OTHER)})
        configs = {"sampler": sampling or SamplingReqConfig(temperature=0.0), "kv_cache": kv}
        infos.append(RequestInfo(request_id, prompt_ids=ids, resource_configs=configs))
        engine.ingest(infos[-1])
    return infos


def run(engine: Engine, infos: list[RequestInfo], steps: int, walks: tuple[str, str] = ("prefill", "decode")) -> Any:
    """Tokens by request id: one step of ``walks[0]``, then ``steps - 1`` of ``walks[1]``."""
    tokens: dict[int, list[int]] = {info.request_id: [] for info in infos}
    decode = Batch("LLM", walks[1], infos)
    for batch in [Batch("LLM", walks[0], infos)] + [decode] * (steps - 1):
        result = engine.exec(batch)
        assert not result.errors, result.errors
        assert result.refused is None, result.refused
        assert not result.host["fault"].any()
        for request_id, token in zip(result.request_ids, result.host["new_token"], strict=True):
            tokens[request_id].append(int(token))
    return tokens
