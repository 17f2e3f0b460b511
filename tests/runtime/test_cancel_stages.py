"""A request that its client cancels, wherever it stands: nobody knows it any more at once, and nobody else notices."""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.conductor.request import EngineRequest, FinishReason, Guide
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions

from .tiny import write_checkpoint

FIRST_ID = 1_000_000  # no row, slot or page has such a number
AHEAD = {
    "off": {"run_ahead": "off"},
    "one": {"run_ahead": "on", "max_steps_ahead": 1},
    "four": {"run_ahead": "on", "max_steps_ahead": 4},
}
IN_GRAPH = ("MSTAR_INGRAPH_DECODE_ROPE", "MSTAR_INGRAPH_DECODE_TOKENS", "MSTAR_SAMPLER_INGRAPH_SCATTER")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def in_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IN_GRAPH:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MSTAR_KV_DEBUG_ASSERTS", "1")


def request(seed: int, prompt: int = 6, max_tokens: int = 24, **fields: Any) -> EngineRequest:
    ids = np.random.default_rng(seed).integers(1, 60, prompt).astype("<i4")
    return EngineRequest(prompt_ids=ids.tobytes(), max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **fields)


class Run:
    def __init__(self, folder: Path, **options: Any) -> None:
        kv = {"max_num_pages": 40, **options.pop("kv", {})}
        values: dict[str, Any] = {
            "device": "cpu",
            "num_threads": 1,
            "page_size": 4,
            "max_seq_len": 128,
            "max_running_requests": 3,
            "max_batch_tokens": 16,
            "prefix_cache": False,
            "deterministic": True,
            "resources": json.dumps({"attn": {"backend": "TRITON"}, "kv_cache": kv}),
        }
        self.core = EngineCore(EngineOptions(model=str(folder), **values | options))
        self.core.conductor._ids = itertools.count(FIRST_ID)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[FinishReason]] = {}

    def submit(self, asked: EngineRequest) -> int:
        request_id = self.core.submit(asked)
        self.tokens[request_id], self.ends[request_id] = [], []
        return request_id

    def step(self) -> None:
        report = self.core.step()
        assert not report.failures
        rows = zip(report.request_ids.tolist(), report.tokens.tolist(), report.finish.tolist(), strict=True)
        for request_id, token, finish in rows:
            assert not self.ends[request_id], "reported after its end"
            self.tokens[request_id] += [token] if token >= 0 else []
            self.ends[request_id] += [FinishReason(finish)] if finish else []

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(300):
            if condition():
                return
            self.step()
        raise AssertionError("it never came to that")

    @property
    def free(self) -> tuple[int, ...]:
        """Rows, pages here and on the host, promises, and who is there."""
        engine, kv = self.core.engine, self.core.engine.resources["kv_cache"]
        kv.check_pages()
        host = 0 if kv._offloading is None else kv._offloading.pool.num_free
        queue = self.core.conductor
        return (
            len(engine._requests._free_rows),
            kv.free_pages,
            kv.promised_pages,
            host,
            queue.num_running,
            queue.num_queued,
            queue.num_queued_tokens,
        )


FOR_REPETITION = ("._flights", "._last_picks", "._steady", "._named_last", ".prepared", "._step_runner._kept")


def who_knows(thing: object, request_id: int, path: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """Where mappings and sets below ``thing`` name the request; what is kept of a step for its repetition aside."""
    seen = set() if seen is None else seen
    if id(thing) in seen or path.endswith(FOR_REPETITION):
        return
    seen.add(id(thing))
    if isinstance(thing, (dict, set, frozenset)) and request_id in thing:
        yield path
    if isinstance(thing, dict):
        children = [(f"{path}[{key!r:.20}]", value) for key, value in thing.items()]
    elif isinstance(thing, (list, tuple, set, deque)):
        children = [(f"{path}[]", value) for value in list(thing)[:64]]
    elif type(thing).__module__.startswith("mstar."):
        children = [(f"{path}.{name}", value) for name, value in getattr(thing, "__dict__", {}).items()]
    else:
        children = []
    for where, value in children:
        yield from who_knows(value, request_id, where, seen)


# Each brings a run with a neighbour to where the request that is cancelled stands; its id.
def queued(run: Run) -> int:
    for seed in (2, 3):
        run.submit(request(seed))
    request_id = run.submit(request(9))
    run.step()
    assert run.core.conductor.num_queued == 1
    return request_id


def prepared(run: Run) -> int:
    may_go_on = threading.Event()
    run.core.engine.resources["grammar"].prepare_request = lambda config: may_go_on.wait(10)
    request_id = run.submit(request(9, guide=Guide("regex", "a+")))
    run.step()
    assert run.core.conductor.num_queued == 1
    return request_id


def joined(run: Run) -> int:
    request_id = run.submit(request(9))
    assert run.core.conductor.num_running == 2
    return request_id


def between_parts(run: Run) -> int:
    request_id = run.submit(request(9, prompt=60))
    table = run.core.conductor._table
    run.until(lambda: 0 < table.prompt_left[table.row_of[request_id]] < 60)
    return request_id


def in_its_last_part(run: Run) -> int:
    request_id = run.submit(request(9, prompt=40))
    table = run.core.conductor._table
    run.until(lambda: table.prompt_left[table.row_of[request_id]] == 0)
    return request_id


def decoding(run: Run) -> int:
    request_id = run.submit(request(9))
    run.until(lambda: len(run.tokens[request_id]) == 5)
    return request_id


def with_its_last_token_in_flight(run: Run) -> int:
    request_id = run.submit(request(9, max_tokens=5))
    run.until(lambda: len(run.tokens[request_id]) >= 4 or bool(run.ends[request_id]))
    return request_id


STAGES = [queued, prepared, joined, between_parts, in_its_last_part, decoding, with_its_last_token_in_flight]


def check(run: Run, neighbour: int, wanted: list[int], request_id: int) -> None:
    conductor = run.core.conductor
    made = list(run.tokens[request_id])
    for _ in range(3):
        conductor.cancel(request_id)
    known = list(who_knows((conductor, run.core.engine), request_id))
    assert known == [] or known == ["[]._pressure._away"]  # which is gone through with the next step
    has_ended = bool(run.ends[request_id])
    run.step()
    assert not list(who_knows((conductor, run.core.engine), request_id))
    assert len(run.ends[request_id]) == 1  # told with the next call
    assert has_ended or run.ends[request_id] == [FinishReason.CANCELLED]
    conductor.cancel(request_id)
    conductor.finish(request_id, 1)
    conductor.cancel(FIRST_ID + 999)
    run.until(lambda: not run.core.has_work())
    assert run.tokens[request_id] == made  # what was in flight is nobody's
    assert run.tokens[neighbour] == wanted


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[int]:
    run = Run(folder)
    neighbour = run.submit(request(1))
    run.until(lambda: not run.core.has_work())
    return run.tokens[neighbour]


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("stage", STAGES)
def test_a_cancel_frees_all_at_once_and_once(folder, wanted, stage, ahead):
    run = Run(folder, **AHEAD[ahead])
    base = run.free
    neighbour = run.submit(request(1))
    run.until(lambda: len(run.tokens[neighbour]) == 3)
    request_id = stage(run)
    if stage is not with_its_last_token_in_flight:
        assert not run.ends[request_id]
        assert list(who_knows((run.core.conductor, run.core.engine), request_id))
    check(run, neighbour, wanted, request_id)
    assert run.free == base


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("host_pages", [0, 40])
def test_so_does_one_of_a_request_without_pages(folder, wanted, host_pages, ahead):
    kv = {"max_num_pages": 14, "cpu_offload_pages": host_pages}
    run = Run(folder, kv=kv, admission_policy="optimistic", **AHEAD[ahead])
    base = run.free
    neighbour = run.submit(request(1))
    request_id = run.submit(request(9, prompt=14, max_tokens=34))
    run.until(lambda: request_id in run.core.conductor._pressure._away)
    assert bool(run.core.conductor.counters.offloads) is bool(host_pages)
    check(run, neighbour, wanted, request_id)
    assert run.free == base


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_rows_that_ended_in_any_way_are_free_for_the_next(folder, end, ahead):
    """As many requests one after the other as rows and pages have room for, many times over."""
    run = Run(folder, **AHEAD[ahead])
    base, ids = run.free, []
    for number in range(24):
        ids.append(run.submit(request(number, prompt=1 + 5 * (number % 8))))
        for _ in range(number % 4):
            run.step()
        leaving = ids[number // 2]
        if end == "cancel":
            run.core.conductor.cancel(leaving)
        else:
            run.core.conductor.finish(leaving, 0)
    run.until(lambda: not run.core.has_work())
    for request_id in ids:
        assert len(run.ends[request_id]) == 1 or (end == "finish" and not run.ends[request_id])
        assert not list(who_knows((run.core.conductor, run.core.engine), request_id))
    assert run.free == base
