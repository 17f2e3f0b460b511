"""The simulator's steps are the real engine's: one conductor class, the same arrivals, the same compositions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from mstar.conductor.conductor import Conductor
from mstar.conductor.protocols import StepEngine
from mstar.conductor.request import EngineRequest, FinishReason
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions
from mstar.simulate.composition import KINDS
from mstar.simulate.host_costs import HostCosts
from mstar.simulate.measured import MeasuredStep, MeasuredSteps
from mstar.simulate.measures import FAILED
from mstar.simulate.recording import RecordedStep, RecordingEngine
from mstar.simulate.rig import build_rig, step_bounds
from mstar.simulate.trace import Trace, make_trace
from mstar.utils.errors import ErrorCode
from tests.runtime.tiny import HIDDEN, VOCAB, write_checkpoint

CONTEXT, REQUESTS = 128, 40
MODES = {
    "one at a time": {"run_ahead": "off", "mixed_steps": False},
    "mixed": {"run_ahead": "off", "mixed_steps": True},
    "ahead": {"run_ahead": "on", "mixed_steps": False},
    "mixed ahead": {"run_ahead": "on", "mixed_steps": True},
    "whole prompts": {"run_ahead": "on", "mixed_steps": True, "chunked_prefill": False},
}


@dataclass
class Script:
    """Requests by the call of the conductor before which they come, and calls before which some are cancelled."""

    trace: Trace
    arrives: np.ndarray
    stop_ids: list[tuple[int, ...]]
    cancels: dict[int, int]


@dataclass
class Run:
    steps: list[RecordedStep] = field(default_factory=list)
    outputs: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    ends: dict[int, int] = field(default_factory=dict)
    refused_admissions: int = 0
    cached_tokens: int = 0


def make_script(seed: int) -> Script:
    """Bursts of prompts of 1 to 90 tokens, every third with a beginning that another had before; stops and cancels."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 90, REQUESTS)
    outputs = rng.integers(1, 30, REQUESTS)
    streams = np.arange(REQUESTS)
    for late in range(3, REQUESTS, 3):  # of an equal beginning, the shorter one later, so that it is in the prompt
        streams[late] = streams[late - 3]
        prompts[late] = max(1, min(prompts[late], prompts[late - 3] - 1))
    trace = make_trace(np.zeros(REQUESTS), prompts, outputs, streams=streams)
    arrives = np.sort(rng.integers(0, 120, REQUESTS) // 6 * 6)
    stop_ids = [tuple(rng.integers(0, VOCAB, 3).tolist()) if ticket % 4 == 1 else () for ticket in range(REQUESTS)]
    cancels = {int(ticket): int(arrives[ticket] + rng.integers(0, 25)) for ticket in rng.choice(REQUESTS, 4, False)}
    return Script(trace, arrives, stop_ids, cancels)


def prompt_of(script: Script, ticket: int) -> bytes:
    return (np.frombuffer(script.trace.prompt(ticket), "<i4") % VOCAB).astype("<i4").tobytes()


def play(
    conductor: Conductor,
    engine: RecordingEngine,
    script: Script,
    request_of: Callable[[int], EngineRequest],
    on_submit: Callable[[int, int], Any] = lambda request_id, ticket: None,
) -> Run:
    run, ids, call = Run(), {}, 0
    while call <= script.arrives.max() or conductor.has_work():
        for ticket in np.flatnonzero(script.arrives == call).tolist():
            ids[ticket] = conductor.submit(request_of(ticket), ticket=ticket)
            on_submit(ids[ticket], ticket)
        for ticket, at in script.cancels.items():
            if at == call and ticket in ids:
                conductor.cancel(ids[ticket])
        report = conductor.step()
        for failure in report.failures:
            assert failure.code is ErrorCode.UNAVAILABLE, failure
            assert failure.ticket not in run.ends
            run.ends[failure.ticket] = FAILED
        for ticket, token, finish in zip(report.tickets, report.tokens, report.finish, strict=True):
            run.outputs[int(ticket)] += int(token >= 0)
            if finish:
                assert int(ticket) not in run.ends
                run.ends[int(ticket)] = int(finish)
        call += 1
    run.steps = engine.steps
    run.refused_admissions = conductor.counters.refused_admissions
    run.cached_tokens = conductor.counters.cached_prompt_tokens
    return run


def options_of(checkpoint: str, **given: Any) -> EngineOptions:
    defaults = {"max_running_requests": 6, "max_batch_tokens": 48, "max_seq_len": CONTEXT, "page_size": 8}
    return EngineOptions(**{"model": checkpoint, "device": "cpu", "num_threads": 1} | defaults | given)


@torch.inference_mode()
def play_real(options: EngineOptions, script: Script) -> tuple[Run, EngineCore]:
    core = EngineCore(options)
    recorder = RecordingEngine(core.engine)
    conductor = Conductor(cast(StepEngine, recorder), core.model, core.conductor.limits)

    def request_of(ticket: int) -> EngineRequest:
        return EngineRequest(
            prompt_ids=prompt_of(script, ticket),
            max_tokens=int(script.trace.max_tokens[ticket]),
            temperature=0.0,
            stop_ids=script.stop_ids[ticket],
        )

    return play(conductor, recorder, script, request_of), core


def play_simulated(options: EngineOptions, script: Script, real: Run, core: EngineCore) -> Run:
    """The recorded trace: who asked for what, and how long the answers were that really came."""
    answered = np.array([real.outputs[ticket] for ticket in range(REQUESTS)])
    trace = replace(script.trace, output_tokens=answered)
    kv = core.engine.resources["kv_cache"].config
    token_bytes = kv.page_bytes(4) // kv.page_size
    measured = MeasuredSteps(
        source="one step",
        device="cpu",
        max_seq_len=core.info.max_seq_len,
        kv_token_bytes=token_bytes,
        kv_memory_bytes=kv.max_num_pages * kv.page_size * token_bytes,
        host=HostCosts(10, 1, 5),
        steps=[MeasuredStep(1, 1, 0, 0, 0, 1.0)],
    )
    rig = build_rig(options, measured, trace)
    recorder = RecordingEngine(rig.engine)
    conductor = Conductor(cast(StepEngine, recorder), rig.model, rig.conductor.limits, clock=rig.clock)

    def request_of(ticket: int) -> EngineRequest:
        return EngineRequest(
            prompt_ids=prompt_of(script, ticket), max_tokens=int(trace.max_tokens[ticket]), temperature=0.0
        )

    return play(conductor, recorder, script, request_of, rig.engine.ticket_of.__setitem__)


def memory_of(pages: int | None) -> dict[str, int]:
    """The option that gives the tiny checkpoint so many pages; None leaves the default."""
    return {} if pages is None else {"kv_memory_bytes": (pages + 1) * 8 * 2 * HIDDEN * 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pages", [None, 30])
def test_every_step_has_the_real_ones_rows(checkpoint, mode, pages, seed):
    script = make_script(seed)
    options = options_of(checkpoint, **MODES[mode], **memory_of(pages))
    real, core = play_real(options, script)
    simulated = play_simulated(options, script, real, core)
    for number, (theirs, ours) in enumerate(zip(real.steps, simulated.steps, strict=False)):
        assert ours == theirs, f"step {number}"
    assert len(simulated.steps) == len(real.steps)
    assert (simulated.ends, simulated.outputs) == (real.ends, real.outputs)
    assert simulated.cached_tokens == real.cached_tokens


@pytest.mark.parametrize("mode", ["one at a time", "mixed ahead"])
@pytest.mark.parametrize("pages", [None, 40])
def test_of_equal_beginnings_the_same_rows_wait_and_go_first(checkpoint, mode, pages):
    script = make_script(3)
    alike = replace(
        script.trace, streams=np.arange(REQUESTS) // 4 % 6, prompt_tokens=np.maximum(script.trace.prompt_tokens, 80)
    )
    script = replace(script, trace=alike)
    options = options_of(checkpoint, **MODES[mode], **memory_of(pages))
    real, core = play_real(options, script)
    simulated = play_simulated(options, script, real, core)
    assert simulated.steps == real.steps
    assert (simulated.ends, simulated.outputs) == (real.ends, real.outputs)
    assert simulated.cached_tokens == real.cached_tokens > 32 * REQUESTS


def test_optimistic_admission_is_refused_at_the_same_steps(checkpoint):
    script = make_script(2)
    prompts = '{"kv_cache": {"admission_fit": "none"}}'
    options = options_of(checkpoint, run_ahead="on", resources=prompts, **memory_of(24))
    real, core = play_real(options, script)
    simulated = play_simulated(options, script, real, core)
    assert real.refused_admissions > 0
    assert simulated.refused_admissions == real.refused_admissions
    assert simulated.steps == real.steps
    assert simulated.ends == real.ends


def test_the_scripts_have_everything_to_get_wrong(checkpoint):
    real, core = play_real(options_of(checkpoint, run_ahead="on", **memory_of(30)), make_script(0))
    assert set(real.ends.values()) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}
    assert real.cached_tokens > 0
    assert core.conductor.limits.run_ahead
    kinds = {step.compose().kind for step in real.steps}
    assert kinds == set(KINDS)
    lengths = make_script(0).trace.prompt_tokens  # by ticket, which is the conductor's id too
    parts = [
        (request_id, span + stored)
        for step in real.steps
        for request_id, span, stored in zip(step.request_ids, step.spans, step.stored, strict=True)
        if span > 1
    ]
    assert any(end < lengths[request_id] for request_id, end in parts), "no prompt came in parts"


@pytest.mark.parametrize("given", [{}, {"capture_batch_sizes": (1, 2, 4)}, {"max_batch_tokens": 4096}])
def test_bounds_of_steps_are_the_engines(checkpoint, given):
    options = options_of(checkpoint, **given)
    core = EngineCore(options)
    bounds = step_bounds(options, torch.device("cpu"), core.info.max_seq_len)
    for walk in ("decode", "prefill", "mixed"):
        assert core.engine.max_batch_size("LLM", walk) == bounds.max_rows[walk]
    for walk in ("prefill", "mixed"):
        assert tuple(core.engine.packed_sizes("LLM", walk)) == bounds.packed_sizes
    assert tuple(core.engine.packed_sizes("LLM", "decode")) == ()
