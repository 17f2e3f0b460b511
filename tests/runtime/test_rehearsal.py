"""What an engine runs before it serves leaves nothing behind but what it made ready."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions
from mstar.runtime.rehearsal import rehearse, requests_for

from .tiny import VOCAB, greedy, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def load(folder: Path, **options: object) -> EngineCore:
    values = {"device": "cpu", "kv_memory_bytes": 2**20, "max_running_requests": 4} | options
    return EngineCore(EngineOptions(model=str(folder), **values))


def tokens_of(core: EngineCore) -> list[int]:
    core.submit(greedy([1, 2, 3], 8))
    made: list[int] = []
    while core.has_work():
        made += core.step().tokens.tolist()
    return made


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_every_walk_and_variant_is_run(folder, monkeypatch, run_ahead):
    core = load(folder, run_ahead=run_ahead)
    walks, widest = set(), 0
    launch = core.engine.launch

    def spy(batch):
        nonlocal widest
        walks.add(batch.graph_walk)
        widest = max(widest, len(batch.request_ids))
        return launch(batch)

    monkeypatch.setattr(core.engine, "launch", spy)
    rehearse(core)
    assert walks == {"prefill", "mixed", "decode"}
    assert widest == 3


def test_it_leaves_no_row_page_or_count_behind(folder):
    rehearsed, fresh = load(folder), load(folder)
    rehearse(rehearsed)
    assert rehearsed.conductor.pools.num_pages_used == 0
    assert not rehearsed.engine.steps
    assert not rehearsed.engine.eager_steps
    assert rehearsed.conductor.counters == fresh.conductor.counters
    assert tokens_of(rehearsed) == tokens_of(fresh)
    assert rehearsed.engine.steps == fresh.engine.steps
    assert rehearsed.conductor.counters == fresh.conductor.counters


@pytest.mark.parametrize("options", [{"max_seq_len": 2}, {"max_running_requests": 1}, {"prefix_cache": False}])
def test_it_fits_small_engines(folder, caplog, options):
    core = load(folder, **options)
    with caplog.at_level(logging.INFO, "mstar.runtime.rehearsal"):
        rehearse(core)
    told = [record.levelname for record in caplog.records if record.name == "mstar.runtime.rehearsal"]
    assert told == ["INFO"]
    assert core.conductor.pools.num_pages_used == 0


def test_a_failure_is_told_and_the_engine_serves(folder, caplog, monkeypatch):
    core = load(folder)
    expected = tokens_of(core)
    engine = core.engine
    launch = engine.launch
    calls = iter(range(100))

    def fail_once(batch):
        if next(calls) == 0:
            raise RuntimeError("the device is gone")
        return launch(batch)

    monkeypatch.setattr(engine, "launch", fail_once)
    with caplog.at_level(logging.WARNING, "mstar.runtime.rehearsal"):
        rehearse(core)
    assert "the device is gone" in caplog.text
    assert tokens_of(core) == expected


@pytest.mark.parametrize("context", [2, 3, 8, 9, 100])
def test_its_requests_fit_any_context_and_vocabulary(context):
    for request in requests_for(context, VOCAB):
        assert request.num_prompt_tokens >= 1
        assert request.max_tokens is not None
        assert request.num_prompt_tokens + request.max_tokens <= context
        assert int(request.prompt_array().max()) < VOCAB
