"""The engine over the real resources: a two-layer transformer against a dense forward without a cache."""

from __future__ import annotations

import itertools
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
from mstar.engine.resources.attention.config import AttentionConfig, AttentionSpec, AttentionStep
from mstar.engine.resources.kv.config import KVReqConfig, KVStep, PagedKVConfig, PagedKVSpec
from mstar.engine.resources.positions.config import PositionSpec, PositionStep
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.step import AllocationFailed, Segment, SubmoduleStep
from mstar.engine.submodule import ARNodeSubmodule
from mstar.utils import knobs

LAYERS, HEADS, DIM, VOCAB = 2, 2, 16, 61
GREEDY = SamplingReqConfig(temperature=0.0)


ATTENTION = ["SDPA"]


@pytest.fixture(params=["SDPA", "TRITON"], scope="module", autouse=True)
def attention(request):
    """TRITON keeps pages, lengths and positions on the device, and captured steps move them on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSTAR_INGRAPH_DECODE_ROPE", str(int(request.param == "TRITON")))
        ATTENTION.append(request.param)
        yield request.param
        ATTENTION.pop()


class Tiny(ARNodeSubmodule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * DIM
        self.embed = nn.Embedding(VOCAB, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(width, VOCAB, bias=False)

        self.reads_device_loopback = knobs.device_loopback_enabled()
        self.poison: int | None = None  # a token id that breaks the forward
        self.is_captured = False

    def uniform_row_inputs(self, graph_walk):
        return ARNodeInputs(input_seq_len=1) if graph_walk == "decode" else None

    def device_loopback_signals(self, graph_walk):
        return frozenset({"text_inputs"}) if graph_walk == "decode" else frozenset()

    def loopback_outputs(self):
        return {"text_inputs": "new_token"}

    def get_combined_graph_walks(self):
        return {"LLM": {"mixed": ("decode", "prefill")}}

    def prepare_inputs(self, graph_walk, info):
        return ARNodeInputs(input_ids=torch.from_numpy(info.prompt_ids), input_seq_len=info.prompt_ids.size)

    def split_inputs(self, inputs, num_tokens):
        parts = inputs.input_ids[:num_tokens], inputs.input_ids[num_tokens:]
        first, rest = (ARNodeInputs(input_ids=ids, input_seq_len=ids.numel()) for ids in parts)
        return first, rest

    def declare_step(self, graph_walk, request_ids, inputs, slot_lease=None, piecewise_leases=None):
        segments = tuple(Segment(i, "main", x.input_seq_len) for i, x in zip(request_ids, inputs, strict=True))
        steps = {"kv_cache": KVStep(), "attn": AttentionStep(), "rope": PositionStep(), "sampler": SamplerStep()}
        return SubmoduleStep(steps, segments)

    def preprocess(self, graph_walk, engine_inputs, inputs):
        self.is_captured = engine_inputs.captured
        prompts = [row.input_ids for row in inputs if row.input_ids is not None]
        count = len(inputs) - len(prompts)
        if self.reads_device_loopback:
            tokens = [engine_inputs.resources["sampler"].loopback_tokens()[:count]] if count else []
        else:
            tokens = [row.tensors["text_inputs"] for row in inputs[:count]]
        return {"input_ids": torch.cat([*tokens, *prompts])}

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
        if self.poison is not None and (self.is_captured or (tensors["input_ids"] == self.poison).any()):
            raise RuntimeError("poison")
        return BatchedModelOutput(check_stop_buffers={"new_token": tokens, "fault": sampler.faults()})

    def get_accelerator_graph_configs(self, device):
        return [
            BatchedAcceleratorGraphConfig(
                "decode",
                ARNodeInputs({"text_inputs": torch.zeros(1, dtype=torch.int64)}),
                capture_batch_sizes=[1, 2, 4],
            ),
            PackedAcceleratorGraphConfig(
                "prefill",
                [16, 32],
                lambda n: ARNodeInputs(input_ids=torch.zeros(n, dtype=torch.int64), input_seq_len=n),
                replay_graph_walks=["mixed"],
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
            AttentionSpec("attn", nodes, AttentionConfig(backend=ATTENTION[-1])),
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
    kv = KVReqConfig(prompt_tokens=ids.size, prompt_ids=ids)
    return RequestInfo(request_id, prompt_ids=ids, resource_configs={"sampler": config, "kv_cache": kv})


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
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10), min_size=1, max_size=4))
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


def exec_each(engine, batches):
    return [engine.exec(batch) for batch in batches]


def run_ahead(engine, batches):
    flights, results = [engine.launch(batches[0])], []
    for batch in batches[1:]:
        flights.append(engine.launch(batch))
        results.append(engine.collect(flights.pop(0)))
    return [*results, engine.collect(flights[0])]


def plan_ahead(engine, batches):
    flights, results = [engine.launch(batches[0])], []
    for batch in batches[1:]:
        engine.pre_plan(batch)
        flights.append(engine.launch(batch))
        results.append(engine.collect(flights.pop(0)))
    return [*results, engine.collect(flights[0])]


DRIVES = {"exec": exec_each, "run-ahead": run_ahead, "plan-ahead": plan_ahead}
KNOBS = {
    "default": {},
    "plan-thread": {"MSTAR_PRE_PLAN_SPEC": "1"},
    "no-loopback": {"MSTAR_DEVICE_LOOPBACK": "0"},
    "in-graph": {"MSTAR_SAMPLER_INGRAPH_SCATTER": "1", "MSTAR_INGRAPH_DECODE_ROPE": "1"},
    "plan-cache": {"MSTAR_KV_PLAN_CACHE": "1", "MSTAR_KV_PINNED_INDPTRS": "1", "MSTAR_PRE_PLAN_SPEC": "1"},
}


@pytest.mark.parametrize(
    ("name", "settings_name", "drive"),
    [
        *itertools.product(["service-strict"], KNOBS, DRIVES),
        *itertools.product(["eager"], ["default", "no-loopback"], ["run-ahead"]),
        *itertools.product(["captured-at-load"], ["in-graph", "plan-cache"], ["plan-ahead"]),
    ],
)
def test_every_way_to_drive_the_engine_gives_the_same_tokens_while_rows_join_and_leave(
    name, settings_name, drive, monkeypatch
):
    def tokens(engine, drive):
        infos = [request(i, [3 * i + 1] * (2 * i + 2), SamplingReqConfig(temperature=1.0, _seed=i)) for i in range(4)]
        for info in infos:
            engine.ingest(info)
        early, late = Batch("LLM", "decode", infos[:3]), Batch("LLM", "decode", infos[1:])
        mixed = Batch("LLM", "mixed", infos, row_walks=["decode"] * 3 + ["prefill"])
        batches = [Batch("LLM", "prefill", infos[:3]), *[early] * 4, mixed, *[late] * 4, early, late]
        seen = {info.request_id: [] for info in infos}
        for result in drive(engine, batches):
            assert not result.errors
            for request_id, token in zip(result.request_ids, result.host["new_token"].tolist(), strict=True):
                seen[request_id].append(token)
        pages = engine.resources["kv_cache"].free_pages
        for info in infos:
            engine.remove(info.request_id)
        engine.resources["kv_cache"].check_pages()
        return seen, pages

    expected = tokens(make(EagerBackend()), exec_each)
    for variable, value in KNOBS[settings_name].items():
        monkeypatch.setenv(variable, value)
    engine = make(BACKENDS[name]())
    assert tokens(engine, DRIVES[drive]) == expected
    assert engine.counters["retried_steps"] == 0
    if drive == "plan-ahead" and name != "eager":
        assert engine.counters["promoted"] == engine.counters["staged"] == 11


@pytest.mark.parametrize(
    ("name", "settings_name"),
    [*itertools.product(["service-strict"], KNOBS), ("eager", "default"), ("captured-at-load", "in-graph")],
)
def test_a_forward_that_breaks_leaves_no_trace_in_the_tokens_of_its_neighbours(name, settings_name, monkeypatch):
    for variable, value in KNOBS[settings_name].items():
        monkeypatch.setenv(variable, value)
    seeded = [SamplingReqConfig(temperature=1.0, _seed=i) for i in range(3)]
    prompts = [[1, 2, 3], [7] * 5, [60]]

    def serve(poisoned):
        engine = make(BACKENDS[name]())
        tiny = engine._nodes["LLM"].submodule
        infos = [request(i, prompts[i], seeded[i]) for i in range(3)]
        for info in infos:
            engine.ingest(info)
        tokens = run(engine, infos, 4)
        if poisoned:
            tiny.poison = tokens[1][-1]
            spared = [i for i in (0, 2) if tokens[i][-1] != tiny.poison]
            result = engine.exec(Batch("LLM", "decode", infos))
            assert set(result.errors) == {0, 1, 2} - set(spared)
            assert engine.counters["retried_steps"] == 1
            tiny.poison = None
            engine.remove(1)
        else:
            result = engine.exec(Batch("LLM", "decode", infos))
        for i, token in zip(result.request_ids, result.host["new_token"].tolist(), strict=True):
            tokens[i].append(token)
        for _ in range(3):
            result = engine.exec(Batch("LLM", "decode", [infos[0], infos[2]]))
            for i, token in zip(result.request_ids, result.host["new_token"].tolist(), strict=True):
                tokens[i].append(token)
        engine.resources["kv_cache"].check_pages()
        return tokens

    with_poison, without = serve(poisoned=True), serve(poisoned=False)
    assert with_poison[0] == without[0]
    assert with_poison[2] == without[2]


@pytest.mark.parametrize("name", ["eager", "service-strict", "captured-at-load"])
def test_a_prompt_that_was_served_before_is_skipped_as_far_as_it_is_cached(name):
    engine = make(BACKENDS[name]())
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    first = request(0, prompt)
    engine.ingest(first)
    tokens = run(engine, [first], 5)[0]
    engine.remove(0)
    again, longer = request(1, prompt), request(2, [*prompt[:9], 40])
    engine.ingest(again)
    engine.ingest(longer)
    assert (again.cached_tokens, longer.cached_tokens) == (8, 8)  # whole pages of 4, never the last token
    assert run(engine, [again, longer], 5) == {1: tokens, 2: dense_greedy(Tiny(), [*prompt[:9], 40], 5)}
