"""A step that fails: only the request to blame ends, and no other's tokens change, whatever the step had moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar.conductor.request import EngineRequest, FinishReason, LogitEdits
from mstar.engine.executor import Execution
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions
from mstar.utils.errors import ErrorCode

from .tiny import write_checkpoint

IN_GRAPH = ("MSTAR_INGRAPH_DECODE_ROPE", "MSTAR_INGRAPH_DECODE_TOKENS", "MSTAR_SAMPLER_INGRAPH_SCATTER")
STATE = {
    "on the host": {},
    "in the graph": dict.fromkeys(IN_GRAPH, "1"),
    "sent": {"MSTAR_KV_INGRAPH_LENGTHS": "0", "MSTAR_DEVICE_LOOPBACK": "0"},
    "planned ahead": dict.fromkeys((*IN_GRAPH, "MSTAR_PRE_PLAN_SPEC"), "1"),
}
AHEAD = {
    "off": {"run_ahead": "off"},
    "one": {"run_ahead": "on", "max_steps_ahead": 1},
    "four": {"run_ahead": "on", "max_steps_ahead": 4},
}
# What neighbours keep: draws of seeds, histories that penalties look back at, counts, rings of words.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "top_k": 20},
    {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.4, "repetition_window": 16},
    {"temperature": 0.7, "seed": 7, "edits": LogitEdits(frequency_penalty=0.6, bad_words=((3, 4), (5, 6, 7)))},
]
LENGTHS = (5, 23, 9, 14)  # of prompts: with 16 tokens a step, some come in parts
VICTIM = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def load(folder: Path, **options: Any) -> EngineCore:
    values: dict[str, Any] = {
        "device": "cpu",
        "num_threads": 1,
        "kv_memory_bytes": 2**20,
        "page_size": 4,
        "max_seq_len": 128,
        "max_running_requests": 6,
        "max_batch_tokens": 16,
        "deterministic": True,
        "resources": json.dumps({"attn": {"backend": "TRITON"}}),
    }
    return EngineCore(EngineOptions(model=str(folder), **values | options))


def request(number: int, max_tokens: int = 20) -> EngineRequest:
    ids = np.random.default_rng(number).integers(1, 60, LENGTHS[number]).astype("<i4")
    return EngineRequest(prompt_ids=ids.tobytes(), max_tokens=max_tokens, ignore_eos=True, **SAMPLING[number])


class Run:
    """Requests and what came of them."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[object]] = {}
        self.messages: dict[int, str] = {}
        self.logprobs: list[float] = []  # of all that asked

    def submit(self, asked: EngineRequest) -> int:
        request_id = self.core.submit(asked)
        self.tokens[request_id], self.ends[request_id] = [], []
        return request_id

    def step(self) -> None:
        report = self.core.step()
        rows = zip(report.request_ids.tolist(), report.tokens.tolist(), report.finish.tolist(), strict=True)
        for request_id, token, finish in rows:
            assert not self.ends[request_id], "reported after its end"
            self.tokens[request_id] += [token] if token >= 0 else []
            self.ends[request_id] += [FinishReason(finish)] if finish else []
        if report.logprobs is not None:
            self.logprobs += report.logprobs["logprob"].tolist()
        for failure in report.failures:
            self.ends[failure.request_id].append(failure.code)
            self.messages[failure.request_id] = failure.message

    def to_the_end(self) -> None:
        for _ in range(1000):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError("still at work")

    def assert_all_is_free(self) -> None:
        kv = self.core.engine.resources["kv_cache"]
        kv.check_pages()
        assert kv.promised_pages == 0
        assert self.core.conductor.num_running == self.core.conductor.num_queued == 0


def solo(folder: Path, numbers: list[int]) -> dict[int, list[int]]:
    """Each request's tokens when it is alone."""
    core, alone = load(folder), {}
    for number in numbers:
        run = Run(core)
        request_id = run.submit(request(number))
        run.to_the_end()
        alone[number] = run.tokens[request_id]
    return alone


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[int, list[int]]:
    return solo(folder, [0, 1, 2, 3])


class Faults:
    """Makes steps with a request fail: ``where`` "before" or "after" the forward, as often as ``times`` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
        self.is_due: Callable[[Execution], bool] = lambda execution: False
        self.hit: list[tuple[str, int, bool]] = []  # walk, rows, whether captured
        forward = Execution._forward

        def broken(execution: Execution) -> Any:
            output = forward(execution) if where == "after" else None
            if self.is_due(execution):
                batch, planned = execution._prepared.batch, execution._planned
                self.hit.append((batch.graph_walk, len(planned.request_ids), planned.lease is not None))
                raise RuntimeError(f"broke {where} the forward")
            return output if where == "after" else forward(execution)

        monkeypatch.setattr(Execution, "_forward", broken)


def play(
    folder: Path, faults: Faults, is_due: Callable[[Execution], bool], **options: Any
) -> tuple[Run, dict[int, int]]:
    """Two requests run, then two more come; by number their ids."""
    run, ids = Run(load(folder, **options)), {}
    faults.is_due = is_due
    for number in (0, VICTIM):
        ids[number] = run.submit(request(number))
    for _ in range(6):
        run.step()
    for number in (2, 3):
        ids[number] = run.submit(request(number))
    run.to_the_end()
    run.assert_all_is_free()
    return run, ids


def drawn(execution: Execution) -> int:
    """Tokens the victim has drawn in committed steps; -1 where it isn't in the step."""
    ids = execution._planned.request_ids
    if VICTIM not in ids:
        return -1
    sampler = execution._node.resources["sampler"]
    return sampler.offset_of(int(execution._planned.rows[ids.index(VICTIM)]))


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("state", STATE)
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("at", [0, 12])
def test_a_row_that_fails_ends_alone(folder, wanted, monkeypatch, where, at, state, ahead):
    for name, value in STATE[state].items():
        monkeypatch.setenv(name, value)
    faults = Faults(monkeypatch, where)
    run, ids = play(folder, faults, lambda execution: drawn(execution) >= at, **AHEAD[ahead])
    assert {number: run.tokens[ids[number]] for number in (0, 2, 3)} == {n: wanted[n] for n in (0, 2, 3)}
    assert all(run.ends[ids[number]] == [FinishReason.LENGTH] for number in (0, 2, 3))
    assert run.tokens[ids[VICTIM]] == wanted[VICTIM][:at]
    assert run.ends[ids[VICTIM]] == [ErrorCode.INTERNAL]
    assert f"broke {where} the forward" in run.messages[ids[VICTIM]]
    assert (faults.hit[-1][1], faults.hit[-1][2]) == (1, False)  # alone and eager
    assert run.core.conductor.counters.failed == 1


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("state", STATE)
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_step_that_fails_once_costs_nobody_a_token(folder, wanted, monkeypatch, where, state, ahead):
    """Every fourth step of several rows fails, of all walks; row by row they go well."""
    for name, value in STATE[state].items():
        monkeypatch.setenv(name, value)
    faults, seen = Faults(monkeypatch, where), [0]

    def every_fourth(execution: Execution) -> bool:
        seen[0] += len(execution._planned.request_ids) > 1
        return len(execution._planned.request_ids) > 1 and seen[0] % 4 == 0

    run, ids = play(folder, faults, every_fourth, **AHEAD[ahead])
    assert {number: run.tokens[ids[number]] for number in ids} == wanted
    assert not run.messages
    assert {walk for walk, _, _ in faults.hit} >= {"decode", "mixed"}
    assert any(is_captured for _, _, is_captured in faults.hit)
    assert run.core.engine.counters["retried_steps"] == len(faults.hit)


@pytest.mark.parametrize(
    ("resource", "hook"),
    [("kv_cache", "admit"), ("kv_cache", "plan"), ("rope", "plan"), ("sampler", "plan"), ("attn", "plan")],
)
@pytest.mark.parametrize("ahead", AHEAD)
def test_a_resource_that_fails_for_a_row_ends_that_row_alone(folder, wanted, monkeypatch, resource, hook, ahead):
    for name in IN_GRAPH:
        monkeypatch.setenv(name, "1")
    run = Run(load(folder, **AHEAD[ahead]))
    ids = {number: run.submit(request(number)) for number in (0, VICTIM, 2, 3)}
    target = run.core.engine.resources[resource]
    inner = getattr(target, hook)

    def broken(step: Any, ctx: Any) -> Any:
        done = inner(step, ctx)  # half of it is done
        if VICTIM in ctx.request_ids and len(run.tokens[ids[VICTIM]]) >= 3:
            raise RuntimeError(f"broke in {hook}")
        return done

    monkeypatch.setattr(target, hook, broken)
    run.to_the_end()
    run.assert_all_is_free()
    assert {number: run.tokens[ids[number]] for number in (0, 2, 3)} == {n: wanted[n] for n in (0, 2, 3)}
    made = run.tokens[ids[VICTIM]]
    assert made == wanted[VICTIM][: len(made)]
    assert run.ends[ids[VICTIM]] == [ErrorCode.INTERNAL]
    assert f"broke in {hook}" in run.messages[ids[VICTIM]]


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("part", [0, 1])
def test_a_row_that_fails_in_a_part_of_its_prompt_ends_alone(folder, wanted, monkeypatch, part, ahead):
    """Its prompt of 23 tokens comes in parts, the later ones beside rows that generate."""
    faults = Faults(monkeypatch, "after")
    seen = [0]

    def in_that_part(execution: Execution) -> bool:
        ids = execution._planned.request_ids
        if VICTIM not in ids:
            return False
        seen[0] += len(ids) > 1 and seen[0] <= part
        return seen[0] > part and drawn(execution) == 0

    run, ids = play(folder, faults, in_that_part, **AHEAD[ahead])
    assert {number: run.tokens[ids[number]] for number in (0, 2, 3)} == {n: wanted[n] for n in (0, 2, 3)}
    assert (run.tokens[ids[VICTIM]], run.ends[ids[VICTIM]]) == ([], [ErrorCode.INTERNAL])


@pytest.mark.parametrize("ahead", AHEAD)
def test_what_a_failed_step_moved_on_the_device_is_not_taken_for_its_next_owners(folder, monkeypatch, ahead):
    """A lone row fails as it stands at some length; the next one on its row has a prompt of just that length."""
    for name in IN_GRAPH:
        monkeypatch.setenv(name, "1")
    faults, lengths = Faults(monkeypatch, "after"), []
    run = Run(load(folder, max_running_requests=1, **AHEAD[ahead]))
    streams = run.core.engine.resources["kv_cache"]._streams

    def fifth(execution: Execution) -> bool:
        lengths.append(int(streams.stored_len[execution._planned.rows[0]]))
        return len(lengths) == 5

    faults.is_due = fifth
    failed = run.submit(request(0))
    run.to_the_end()
    assert run.ends[failed] == [ErrorCode.INTERNAL]
    assert faults.hit == [("decode", 1, True)]
    faults.is_due = lambda execution: False
    ids = np.arange(1, lengths[-1] + 1, dtype="<i4").tobytes()
    following = EngineRequest(prompt_ids=ids, max_tokens=12, temperature=0.0, ignore_eos=True, num_logprobs=0)
    got = run.submit(following)
    run.to_the_end()
    fresh = Run(load(folder))
    expected = fresh.submit(following)
    fresh.to_the_end()
    assert run.tokens[got] == fresh.tokens[expected]
    assert run.logprobs == fresh.logprobs


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("host_pages", [0, 40])
@pytest.mark.parametrize("who", ["the one that came back", "another while one is away"])
def test_a_row_that_fails_while_pages_are_short_ends_alone(folder, monkeypatch, who, host_pages, ahead):
    for name in IN_GRAPH:
        monkeypatch.setenv(name, "1")
    kv = {"max_num_pages": 20, "cpu_offload_pages": host_pages}
    resources = json.dumps({"attn": {"backend": "TRITON"}, "kv_cache": kv})
    faults, back = Faults(monkeypatch, "after"), set()
    core = load(folder, admission_policy="optimistic", prefix_cache=False, resources=resources, **AHEAD[ahead])
    run = Run(core)
    ids = [run.submit(request(number, 30)) for number in (0, 2, 3)]
    victim = ids[-1] if who == "the one that came back" else ids[0]

    def is_due(execution: Execution) -> bool:
        gone = set(core.conductor._pressure._away)
        back.update(gone)
        is_time = victim not in gone and victim in back if victim == ids[-1] else bool(gone)
        return is_time and victim in execution._planned.request_ids

    faults.is_due = is_due
    run.to_the_end()
    run.assert_all_is_free()
    assert not len(core.conductor._pressure)
    assert core.conductor.counters.preemptions > 0
    assert bool(core.conductor.counters.offloads) is bool(host_pages)
    assert faults.hit
    assert run.ends[victim] == [ErrorCode.INTERNAL]
    for request_id, number in zip(ids, (0, 2, 3), strict=True):
        fresh = Run(load(folder))
        alone = fresh.submit(request(number, 30))
        fresh.to_the_end()
        if request_id == victim:
            assert run.tokens[request_id] == fresh.tokens[alone][: len(run.tokens[request_id])]
        else:
            assert (run.tokens[request_id], run.ends[request_id]) == (fresh.tokens[alone], [FinishReason.LENGTH])


@pytest.mark.parametrize("ahead", AHEAD)
def test_who_waits_for_the_prefix_of_a_row_that_fails_goes_on_without(folder, monkeypatch, ahead):
    shared = np.random.default_rng(1).integers(1, 60, 100).astype("<i4").tobytes()
    asked = EngineRequest(prompt_ids=shared, max_tokens=10, temperature=0.0, ignore_eos=True)
    fresh = Run(load(folder))
    alone = fresh.submit(asked)
    fresh.to_the_end()
    faults = Faults(monkeypatch, "after")
    run = Run(load(folder, **AHEAD[ahead]))
    first, second, third = (run.submit(asked) for _ in range(3))
    table = run.core.conductor._table
    faults.is_due = lambda execution: (
        first in execution._planned.request_ids and table.prompt_at[table.row_of[first]] >= 48
    )
    run.to_the_end()
    run.assert_all_is_free()
    assert (run.tokens[first], run.ends[first]) == ([], [ErrorCode.INTERNAL])
    for request_id in (second, third):
        assert run.tokens[request_id] == fresh.tokens[alone]
        assert run.ends[request_id] == [FinishReason.LENGTH]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("state", ["in the graph", "planned ahead"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_on_a_gpu_too(folder, monkeypatch, where, state):
    """Rows without a history, which a replayed graph moves and only a draw in Python can take back."""
    for name, value in STATE[state].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(globals(), "SAMPLING", [SAMPLING[0], SAMPLING[1], SAMPLING[0], {"temperature": 0.7, "seed": 7}])
    on_gpu = {"device": "cuda", **AHEAD["four"]}
    alone = {}
    core = load(folder, **on_gpu)
    for number in range(4):
        run = Run(core)
        request_id = run.submit(request(number))
        run.to_the_end()
        alone[number] = run.tokens[request_id]
    faults, seen = Faults(monkeypatch, where), [0]

    def every_fourth(execution: Execution) -> bool:
        seen[0] += len(execution._planned.request_ids) > 1
        return len(execution._planned.request_ids) > 1 and seen[0] % 4 == 0

    run, ids = play(folder, faults, every_fourth, **on_gpu)
    assert {number: run.tokens[ids[number]] for number in ids} == alone
    assert any(is_captured for _, _, is_captured in faults.hit)
    run, ids = play(folder, faults, lambda execution: drawn(execution) >= 12, **on_gpu)
    assert {number: run.tokens[ids[number]] for number in (0, 2, 3)} == {n: alone[n] for n in (0, 2, 3)}
    assert run.tokens[ids[VICTIM]] == alone[VICTIM][:12]
    assert run.ends[ids[VICTIM]] == [ErrorCode.INTERNAL]
