"""A whole engine in this process: what a checkpoint declares holds in what it generates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from mstar.runtime.core import EngineCore, _run_ahead
from mstar.runtime.messages import EngineRequest, FinishReason
from mstar.runtime.options import EngineOptions
from mstar.utils.errors import ErrorCode, LoadError

from .tiny import VOCAB, write_checkpoint

PROMPT = [1, 2, 3]
LENGTH = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


def load(folder: Path, **options: object) -> EngineCore:
    values = {"device": "cpu", "kv_memory_bytes": 2**20, "max_running_requests": 4} | options
    return EngineCore(EngineOptions(model=str(folder), **values))


def request(prompt: list[int] = PROMPT, **fields: object) -> EngineRequest:
    values = {"max_tokens": LENGTH, "temperature": 0.0} | fields
    return EngineRequest(prompt_ids=np.array(prompt, "<i4").tobytes(), **values)


def run(core: EngineCore, *requests: EngineRequest) -> list[tuple[list[int], object]]:
    """Tokens and the end (a finish reason, or an error code) of each."""
    tokens: dict[int, list[int]] = {core.submit(each): [] for each in requests}
    ends: dict[int, object] = {}
    while core.has_work():
        report = core.step()
        for row, token, finish in zip(report.request_ids, report.tokens, report.finish, strict=True):
            if token >= 0:
                tokens[int(row)].append(int(token))
            if finish:
                ends[int(row)] = FinishReason(int(finish))
        ends |= {failure.request_id: failure.code for failure in report.failures}
    return [(made, ends[row]) for row, made in tokens.items()]


def declare_eos(folder: Path, place: str, eos: int, other: int) -> None:
    """Make ``eos`` an end token in one of the three places that can say so, and ``other`` in the others."""
    ids = {name: eos if name == place else other for name in ("config", "generation_config", "tokenizer_config")}
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": ids["config"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["generation_config"], other]}))
    added = {str(ids["tokenizer_config"]): {"content": "<end>"}}
    tokenizer = {"eos_token": "<end>", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("place", ["config", "generation_config", "tokenizer_config"])
def test_an_end_token_stops_wherever_the_checkpoint_declares_it(folder: Path, place: str) -> None:
    ((whole, _),) = run(load(folder), request(ignore_eos=True))
    end = next(index for index in range(1, LENGTH) if whole[index] not in whole[:index])
    declare_eos(folder, place, whole[end], other=next(id for id in range(VOCAB) if id not in whole))
    cut, ignoring = run(load(folder), request(), request(ignore_eos=True))
    assert cut == (whole[:end], FinishReason.STOP)
    assert ignoring == (whole, FinishReason.LENGTH)


def test_broken_logits_end_their_request_with_an_error_and_are_counted(folder: Path) -> None:
    healthy = run(load(folder), request())
    weights = load_file(folder / "model.safetensors")
    # Token 50 is poisoned as an input only: the head is a copy from before.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][50] = np.nan
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    core = load(folder)
    bad, good = run(core, request([50]), request())
    assert bad == ([], ErrorCode.INTERNAL)
    assert [good] == healthy
    assert core.conductor.counters.row_faults == 1
    assert core.conductor.num_running == 0


@pytest.mark.parametrize(("choice", "ahead"), [("auto", False), ("on", True), ("off", False)])
def test_run_ahead_is_automatic_only_beside_a_device(folder: Path, choice: str, ahead: bool) -> None:
    limits = load(folder, run_ahead=choice).conductor.limits
    assert (limits.run_ahead, limits.mixed_steps) == (ahead, True)


@pytest.mark.parametrize(("choice", "ahead"), [("auto", True), ("on", True), ("off", False)])
def test_beside_a_device_run_ahead_is_on_unless_it_is_turned_off(choice: str, ahead: bool) -> None:
    assert _run_ahead(choice, torch.device("cuda", 0)) is ahead


@pytest.mark.parametrize("mixed", [True, False])
def test_running_ahead_and_mixing_change_no_token(folder: Path, mixed: bool) -> None:
    requests = [request([n, n + 1, n + 2][: 1 + n % 3], seed=n, temperature=float(n % 2)) for n in range(9)]
    plain = run(load(folder, run_ahead="off", mixed_steps=False, deterministic=True), *requests)
    core = load(folder, run_ahead="on", mixed_steps=mixed, deterministic=True)
    assert run(core, *requests) == plain


def test_a_cached_prefix_is_counted_and_changes_no_token(folder: Path) -> None:
    core = load(folder, page_size=4, deterministic=True)
    prompt = list(range(1, 15))
    (first,) = run(core, request(prompt))
    (second,) = run(core, request(prompt))
    assert first == second
    assert core.conductor.counters.prompt_tokens == 28
    assert core.conductor.counters.cached_prompt_tokens == 12
    assert run(load(folder, page_size=4, prefix_cache=False, deterministic=True), request(prompt)) == [first]


def test_no_more_requests_run_than_the_sampler_has_rows_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_SAMPLER_INGRAPH_SCATTER", "1")
    monkeypatch.setenv("MSTAR_SAMPLER_SLOTS", "2")
    core = load(folder)
    for n in range(4):
        core.submit(request([n + 1]))
    assert (core.info.max_running_requests, core.conductor.num_running, core.conductor.num_queued) == (2, 2, 2)


def test_settings_of_resources_come_from_the_option(folder: Path) -> None:
    core = load(folder, resources='{"kv_cache": {"admission_fit": "peak", "prefix_cache": false}}')
    config = core.engine.resources["kv_cache"].config
    assert (config.admission_fit, config.prefix_cache) == ("peak", False)
    assert run(core, request()) == run(load(folder), request())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{x", "option resources: not JSON"),
        ("[]", "option resources: a JSON object of objects"),
        ('{"kv_cache": 1}', "option resources: a JSON object of objects"),
        ('{"cache": {}}', "option resources: unknown resource 'cache'"),
        ('{"kv_cache": {"admission_fit": "best"}}', "option resources: resource 'kv_cache': admission_fit"),
    ],
)
def test_settings_that_fit_nothing_are_a_load_error(folder: Path, text: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        load(folder, resources=text)


def test_memory_that_the_host_does_not_have_is_a_load_error_that_names_the_option(folder: Path) -> None:
    with pytest.raises(LoadError, match=r"kv_host_memory_bytes: .* got \d+ bytes, which cannot be allocated"):
        load(folder, resources=json.dumps({"kv_cache": {"cpu_offload_pages": 2**40}}))


@pytest.mark.parametrize(
    "name",
    ["MSTAR_KV_PLAN_CACHE", "MSTAR_DEVICE_LOOPBACK", "MSTAR_NUM_SLOTS", "MSTAR_PRE_PLAN_SPEC", "MSTAR_GRAPH_STRICT"],
)
def test_a_malformed_variable_is_a_load_error_that_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "yes")
    with pytest.raises(LoadError, match=f"{name}='yes'"):
        load(folder)


def test_one_slot_is_too_few_for_a_sampler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(load(folder), request())
    monkeypatch.setenv("MSTAR_NUM_SLOTS", "1")
    assert run(load(folder), request()) == expected
    assert re.search("MSTAR_NUM_SLOTS=1: raised to 2, .*sampler needs? double buffers", caplog.text)
    caplog.clear()
    monkeypatch.setenv("MSTAR_NUM_SLOTS", "3")
    assert run(load(folder), request()) == expected
    assert "raised" not in caplog.text
