"""While all that a step needs is on the device, several are launched before the first one's tokens are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mstar.runtime.core import EngineCore
from mstar.runtime.messages import EngineRequest
from mstar.runtime.options import parse_options

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
IN_GRAPH = ("MSTAR_INGRAPH_DECODE_ROPE", "MSTAR_INGRAPH_DECODE_TOKENS", "MSTAR_SAMPLER_INGRAPH_SCATTER")
REQUESTS = [
    {"max_tokens": 45, "temperature": 0.0, "ignore_eos": True},
    {"max_tokens": 30, "temperature": 0.9, "seed": 5, "top_k": 20, "ignore_eos": True},
    {"max_tokens": 60, "temperature": 0.7, "seed": 6, "ignore_eos": True},
    {"max_tokens": 25, "temperature": 0.8, "seed": 7, "repetition_penalty": 1.3},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def play(
    folder: Path, max_steps_ahead: int, requests: list[dict], attention: str = "TRITON", device: str = "cpu"
) -> tuple[list[list[int]], list[int], EngineCore]:
    """Each request's tokens, and how many steps were in flight behind each call."""
    options = {
        "model": str(folder),
        "load_format": "dummy",
        "device": device,
        "dtype": "float32",
        "max_running_requests": 4,
        "run_ahead": "on",
        "max_steps_ahead": max_steps_ahead,
        "resources": json.dumps({"attn": {"backend": attention}}),
    }
    core = EngineCore(parse_options(options)[0])
    generator = np.random.default_rng(0)
    ids = [
        core.submit(EngineRequest(prompt_ids=generator.integers(3, 190, 7 + 9 * i).astype("<i4").tobytes(), **request))
        for i, request in enumerate(requests)
    ]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    depths = []
    while core.has_work():
        report = core.step()
        depths.append(len(core.conductor._flights))
        for request_id, token in zip(report.request_ids.tolist(), report.tokens.tolist(), strict=True):
            if token >= 0:
                tokens[request_id].append(token)
        assert not report.failures
    return [tokens[request_id] for request_id in ids], depths, core


def test_tokens_are_those_of_one_step_at_a_time_and_pages_come_back(folder, monkeypatch):
    for name in IN_GRAPH:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MSTAR_KV_DEBUG_ASSERTS", "1")
    requests = REQUESTS[:3]  # rows that look back at their own tokens plan each step
    wanted, shallow, _ = play(folder, 1, requests)
    got, deep, core = play(folder, 4, requests)
    assert got == wanted
    assert (max(shallow), max(deep)) == (1, 4)
    assert [len(each) for each in got] == [45, 30, 60]
    core.engine.resources["kv_cache"].check_pages()


@pytest.mark.parametrize("missing", IN_GRAPH)
def test_what_a_step_needs_of_the_host_keeps_the_queue_short(folder, monkeypatch, missing):
    for name in IN_GRAPH:
        monkeypatch.setenv(name, "0" if name == missing else "1")
    _, depths, _ = play(folder, 4, REQUESTS[:3])
    assert max(depths) == 1


@pytest.mark.parametrize("lengths", ["0", "1"])
def test_lengths_move_in_the_graph_or_are_sent(folder, monkeypatch, lengths):
    monkeypatch.setenv("MSTAR_KV_INGRAPH_LENGTHS", lengths)
    _, _, core = play(folder, 1, REQUESTS[:1])
    assert core.engine.resources["kv_cache"].counters["ingraph_length_steps"] == 44 * int(lengths)


def test_a_row_that_looks_back_keeps_it_short_as_long_as_it_runs(folder, monkeypatch):
    for name in IN_GRAPH:
        monkeypatch.setenv(name, "1")
    wanted, _, _ = play(folder, 1, REQUESTS)
    got, depths, _ = play(folder, 4, REQUESTS)
    assert got == wanted
    assert max(depths[:20]) == 1
    assert max(depths) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_attention_that_plans_every_step_anew_runs_eager_and_right(folder):
    wanted, _, captured = play(folder, 1, REQUESTS, "TRITON", "cuda:0")
    got, _, eager = play(folder, 1, REQUESTS, "SDPA", "cuda:0")
    assert not captured.engine.eager_steps
    assert {reason for _, _, reason in eager.engine.eager_steps} == {"resource"}
    assert eager.engine.eager_steps.total() == eager.engine.steps.total()
    assert got == wanted
