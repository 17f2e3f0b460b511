"""The engine over the real resources: a two-layer transformer against a dense forward without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.accelerator_graph_config import BatchedAcceleratorGraphConfig, PackedAcceleratorGraphConfig
from mstar.engine.batch import Batch
from mstar.engine.engine import Engine
from mstar.engine.inputs import ARNodeInputs, RequestInfo
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.resources.attention.config import AttentionSpec, AttentionStep
from mstar.engine.resources.kv.config import KVStep, PagedKVConfig, PagedKVSpec
from mstar.engine.resources.positions.config import PositionSpec, PositionStep
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.step import AllocationFailed, Segment, SubmoduleStep
from mstar.engine.submodule import ARNodeSubmodule

LAYERS, HEADS, DIM, VOCAB = 2, 2, 16, 61
GREEDY = SamplingReqConfig(temperature=0.0)


class Tiny(ARNodeSubmodule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * DIM
        self.embed = nn.Embedding(VOCAB, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def uniform_row_inputs(self, graph_walk):
        return ARNodeInputs(input_seq_len=1) if graph_walk == "decode" else None

    def prepare_inputs(self, graph_walk, info):
        return ARNodeInputs(input_ids=torch.from_numpy(info.prompt_ids), input_seq_len=info.prompt_ids.size)

    def declare_step(self, graph_walk, request_ids, inputs, slot_lease=None, piecewise_leases=None):
        segments = tuple(Segment(i, "main", x.input_seq_len) for i, x in zip(request_ids, inputs, strict=True))
        steps = {"kv_cache": KVStep(), "attn": AttentionStep(), "rope": PositionStep(), "sampler": SamplerStep()}
        return SubmoduleStep(steps, segments)

    def preprocess(self, graph_walk, engine_inputs, inputs):
        if graph_walk == "decode":
            return {"input_ids": engine_inputs.resources["sampler"].loopback_tokens()}
        return {"input_ids": torch.cat([row.input_ids for row in inputs])}

    def run(self, ids: torch.Tensor, attend: Any) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.qkv:
            q, k, v = layer(x).view(-1, 3, HEADS, DIM).unbind(1)
            x = x + attend(q, k, v).reshape(x.shape)
        return x

    def forward_batched(self, graph_walk, engine_inputs, **tensors):
        attn, rope, sampler = (engine_inputs.resources[key] for key in ("attn", "rope", "sampler"))
        x = self.run(tensors["input_ids"], lambda q, k, v: attn.attend(*rope.rotate(q, k), v))
        tokens = sampler.sample(self.head(attn.last_rows(x)))
        return BatchedModelOutput(check_stop_buffers={"new_token": tokens, "fault": sampler.faults()})

    def get_accelerator_graph_configs(self, device):
        return [
            BatchedAcceleratorGraphConfig("decode", ARNodeInputs(), capture_batch_sizes=[1, 2, 4]),
            PackedAcceleratorGraphConfig(
                "prefill",
                [16, 64],
                lambda n: ARNodeInputs(input_ids=torch.zeros(n, dtype=torch.int64), input_seq_len=n),
                capture_batch_sizes=[1, 4],
            ),
        ]


@torch.inference_mode()
def dense_greedy(tiny: Tiny, prompt: list[int], steps: int) -> list[int]:
    ids = list(prompt)

    def attend(q, k, v):
        n = q.shape[0]
        angle = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = (f(angle).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
        q, k = (t * cos + torch.cat([-t[..., DIM // 2 :], t[..., : DIM // 2]], -1) * sin for t in (q, k))
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    for _ in range(steps):
        ids.append(int(tiny.head(tiny.run(torch.tensor(ids), attend)[-1]).argmax()))
    return ids[len(prompt) :]


def strict_captures():
    return CpuGraphBackend(warmup_forwards=2, capture_at_load=True, strict=True)


BACKENDS = {
    "eager": EagerBackend,
    "service": CpuGraphBackend,
    "service-strict": lambda: CpuGraphBackend(strict=True),
    "captured-at-load": strict_captures,
}


def make(backend: Any, pages: int = 64) -> Engine:
    nodes = {"LLM"}
    engine = Engine(
        {"LLM": Tiny()},
        [
            SamplerSpec("sampler", nodes, VOCAB),
            PagedKVSpec(
                "kv_cache",
                nodes,
                PagedKVConfig(
                    num_layers=LAYERS,
                    num_kv_heads=HEADS,
                    head_dim=DIM,
                    max_seq_len=64,
                    max_num_pages=pages,
                    page_size=4,
                ),
            ),
            AttentionSpec("attn", nodes),
            PositionSpec("rope", nodes),
        ],
        device="cpu",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        capacity=4,
        backend=backend,
    )
    engine.warm_up()
    return engine


def request(request_id: int, prompt: list[int], config: SamplingReqConfig = GREEDY) -> RequestInfo:
    ids = np.array(prompt, dtype=np.int64)
    return RequestInfo(request_id, prompt_ids=ids, resource_configs={"sampler": config})


def run(engine: Engine, infos: list[RequestInfo], steps: int) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {info.request_id: [] for info in infos}
    decode = Batch("LLM", "decode", infos)
    for batch in [Batch("LLM", "prefill", infos)] + [decode] * (steps - 1):
        result = engine.exec(batch)
        assert not result.errors, result.errors
        assert not result.host["fault"].any()
        for request_id, token in zip(result.request_ids, result.host["new_token"], strict=True):
            tokens[request_id].append(int(token))
    return tokens


@pytest.mark.parametrize("name", BACKENDS)
def test_every_path_gives_the_tokens_of_a_dense_forward(name):
    engine = make(BACKENDS[name]())
    prompts = {0: [1, 2, 3], 1: [7] * 9, 2: [60]}
    infos = [request(i, prompt) for i, prompt in prompts.items()]
    for info in infos:
        engine.ingest(info)
    assert run(engine, infos, 8) == {i: dense_greedy(Tiny(), prompt, 8) for i, prompt in prompts.items()}
    if name != "eager":
        assert not engine.eager_steps


@pytest.mark.parametrize("name", ["captured-at-load", "service-strict"])
@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=4))
def test_random_ragged_batches_replay_as_they_run_eager(name, prompts):
    tokens = []
    for backend in (EagerBackend(), BACKENDS[name]()):
        engine = make(backend)
        config = SamplingReqConfig(temperature=1.0, _seed=5)
        infos = [request(i, prompt, config) for i, prompt in enumerate(prompts)]
        for info in infos:
            engine.ingest(info)
        tokens.append(run(engine, infos, 4))
    assert tokens[0] == tokens[1]


def test_warm_up_and_padding_own_no_pages_and_a_removed_request_frees_its_own():
    engine = make(strict_captures())
    kv = engine.resources["kv_cache"]
    assert kv.free_pages == kv.num_usable_pages
    infos = [request(i, [1] * 5) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    run(engine, infos, 3)
    assert kv.free_pages == kv.num_usable_pages - 3 * 2
    for info in infos:
        engine.remove(info.request_id)
    assert kv.free_pages == kv.num_usable_pages


def test_padding_leaves_every_real_page_untouched():
    engine = make(strict_captures())
    kv = engine.resources["kv_cache"]
    bystander, other = request(0, [1, 2, 3]), request(1, [4, 5, 6, 7, 8])
    engine.ingest(bystander)
    engine.ingest(other)
    run(engine, [bystander], 1)
    pages = kv.page_table[bystander.row, : kv.num_pages[bystander.row]]
    before = kv.cache[:, pages].clone()
    run(engine, [other], 6)
    assert torch.equal(kv.cache[:, pages], before)


def test_a_pool_that_is_full_refuses_the_step_and_serves_it_later():
    engine = make(CpuGraphBackend(), pages=5)
    first, second = request(0, [1] * 12), request(1, [2] * 8)
    engine.ingest(first)
    engine.ingest(second)
    run(engine, [first], 1)
    result = engine.exec(Batch("LLM", "prefill", [second]))
    assert result.failed_resource == "kv_cache"
    assert isinstance(result.refused.reason, AllocationFailed)
    engine.remove(0)
    assert run(engine, [second], 3) == {1: dense_greedy(Tiny(), [2] * 8, 3)}
