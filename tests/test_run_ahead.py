"""Running ahead and mixing prompts into steps, over the real model: faster or not, never other tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from mstar.conductor.request import EngineRequest, FinishReason
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions

pytestmark = pytest.mark.model
CASES = json.loads((Path(__file__).parent / "data" / "golden" / "smollm2_135m_greedy.json").read_text())["cases"]
ROWS = 4


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)


def requests() -> list[tuple[int, EngineRequest, int | None]]:
    """(step of arrival, request, tokens after which its client cancels); greedy and seeded, stops and budgets."""
    made = []
    for number, case in enumerate(CASES[1:7]):
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": number}
        if number % 2:  # one of its own first tokens stops a greedy request
            sampling = {"temperature": 0.0, "stop_ids": (case["output_ids"][2 + number],)}
        request = EngineRequest(
            prompt_ids=np.array(case["prompt_ids"], "<i4").tobytes(), max_tokens=(10, 8, 5)[number % 3], **sampling
        )
        made.append((number, request, 3 if number == 4 else None))
    return made


def play(run_ahead: str, mixed: bool) -> tuple[list[Outcome], EngineCore]:
    core = EngineCore(
        EngineOptions(
            model="smollm2-135m",
            device="cpu",
            kv_memory_bytes=2**25,
            max_running_requests=ROWS,
            max_seq_len=128,
            run_ahead=run_ahead,
            mixed_steps=mixed,
            prefix_cache=False,
            deterministic=True,
        )
    )
    arrivals, outcomes = requests(), {}
    step = 0
    while core.has_work() or len(outcomes) < len(arrivals):
        for at, request, _ in arrivals:
            if at == step:
                outcomes[core.submit(request)] = Outcome()
        report = core.step()
        assert not report.failures
        for row, token, finish in zip(report.request_ids, report.tokens, report.finish, strict=True):
            outcome = outcomes[int(row)]
            outcome.tokens += [int(token)] if token >= 0 else []
            outcome.ends += [FinishReason(int(finish))] if finish else []
            if arrivals[int(row)][2] == len(outcome.tokens) and not outcome.ends:
                core.cancel(int(row))
        step += 1
    kv = core.engine.resources["kv_cache"]
    kv.check_pages()
    assert kv.free_pages == kv.num_usable_pages
    return list(outcomes.values()), core


@pytest.fixture(scope="module")
def plain() -> list[Outcome]:
    return play("off", mixed=False)[0]


def test_there_are_stops_budgets_and_a_cancel_to_get_wrong(plain):
    ends = [outcome.ends for outcome in plain]
    assert all(len(each) == 1 for each in ends)
    assert {each[0] for each in ends} == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}


@pytest.mark.parametrize(("run_ahead", "mixed"), [("on", False), ("off", True), ("on", True)])
def test_every_mode_gives_the_same_tokens_and_ends(plain, run_ahead, mixed):
    outcomes, core = play(run_ahead, mixed)
    assert outcomes == plain
    assert bool(core.engine.steps["LLM", "mixed"]) is mixed
    assert bool(core.conductor.counters.discarded_tokens) is (run_ahead == "on")
