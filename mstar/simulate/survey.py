"""Measures the steps of a real engine over many compositions, for a cost model."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np
import torch

from mstar.conductor.conductor import Conductor
from mstar.conductor.protocols import StepEngine
from mstar.conductor.request import EngineRequest
from mstar.engine.resources.kv.config import PagedKVSpec
from mstar.runtime.core import EngineCore
from mstar.simulate.measured import HostCosts, MeasuredStep, MeasuredSteps
from mstar.simulate.recording import RecordingEngine

CONTEXTS = (32, 256, 1024)  # prompt tokens in the middle of a group
TOKENS = 12  # that each request of a group generates
FEW = 4  # that come one by one
STAGGER = 3  # steps between arrivals within a group, so that prompts come beside rows that generate
SPREAD = 0.5  # of the middle, to both sides


class Group(NamedTuple):
    """Requests that overlap, one more every ``stagger`` steps; 0: all at once."""

    rows: int
    prompt_tokens: int
    stagger: int


def groups(most_rows: int, longest: int, most_tokens: int) -> Iterator[Group]:
    """1, 2, 4, ... requests at once with short and with long prompts, of up to ``most_tokens`` together, and for each
    length a few one by one."""
    sizes = sorted({*(2**power for power in range(most_rows.bit_length())), most_rows})
    for prompt_tokens in CONTEXTS:
        if prompt_tokens * (1 + SPREAD) + TOKENS <= longest:
            yield from (Group(rows, prompt_tokens, 0) for rows in sizes if rows * prompt_tokens <= most_tokens)
            yield Group(min(FEW, most_rows), prompt_tokens, STAGGER)


def survey(core: EngineCore, most_tokens: int = 4096, repeats: int = 3, seed: int = 0) -> MeasuredSteps:
    """Runs groups of requests through a loaded engine, a step at a time, and measures each step and the host's part.

    A step lasts from its launch to its tokens on the host; on a GPU what the host does to launch it is in that.

    Args:
        core: loaded without running ahead, so that no step waits for another.
        most_tokens: of the prompts of requests that run together; more takes longer.
        repeats: how often all of it runs; of each step the median counts, for other work on a machine comes and goes.

    Raises:
        ValueError: it runs ahead, and would measure two steps at once.
    """
    if core.conductor.limits.run_ahead:
        raise ValueError("steps are measured one by one: load the engine with run_ahead=off")
    clock, measured_by = _clock_of(core)
    recorder = RecordingEngine(core.engine, clock)
    conductor = Conductor(cast(StepEngine, recorder), core.model, core.conductor.limits)
    most_rows, longest = conductor.max_running_requests, core.model.max_seq_len
    for group in (Group(1, CONTEXTS[0], 0), Group(most_rows, CONTEXTS[0], 0)):  # buffers, and captures of both kinds
        _run(conductor, core, group, np.random.default_rng(seed), _HostTimes(), recorder, clock)
    host = _HostTimes()
    rounds: list[list[float]] = []
    for _ in range(repeats):
        rng = np.random.default_rng(seed)
        recorder.steps.clear()
        recorder.step_ms.clear()
        for group in groups(most_rows, longest, most_tokens):
            _run(conductor, core, group, rng, host, recorder, clock)
        rounds.append([*recorder.step_ms])
    compositions = [step.compose() for step in recorder.steps]  # those of every round
    medians = np.median(np.array(rounds), axis=0).tolist()
    kv = next(spec for spec in core.model.resource_specs if isinstance(spec, PagedKVSpec)).config
    token_bytes = kv.page_bytes(core.model.kv_dtype.itemsize) // kv.page_size
    info = core.info
    how = f"mstar simulate fit, {measured_by}, medians of {repeats}"
    return MeasuredSteps(
        source=f"{info.model}, {info.dtype}, {_machine(info.device)}: {how}",
        device=torch.device(info.device).type,
        max_seq_len=info.max_seq_len,
        kv_token_bytes=token_bytes,
        kv_memory_bytes=kv.max_num_pages * kv.page_size * token_bytes,
        host=host.costs(),
        steps=[MeasuredStep(*step, taken) for step, taken in zip(compositions, medians, strict=True)],
    )


class _HostTimes:
    """Seconds of calls of the conductor less the step's own, with the rows of each; and of submissions."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float]] = []
        self.submissions: list[float] = []

    def costs(self) -> HostCosts:
        """A line through the calls' medians by number of rows, and the median submission."""
        by_rows: dict[int, list[float]] = {}
        for rows, seconds in self.calls:
            by_rows.setdefault(rows, []).append(seconds)
        medians = {rows: statistics.median(each) for rows, each in by_rows.items()}
        slope, start = np.polyfit(list(medians), list(medians.values()), 1) * 1e6
        request_us = statistics.median(self.submissions) * 1e6
        return HostCosts(round(max(float(start), 0.0), 1), round(max(float(slope), 0.0), 2), round(request_us, 1))


@torch.inference_mode()  # as the engine's own loop runs
def _run(
    conductor: Conductor,
    core: EngineCore,
    group: Group,
    rng: np.random.Generator,
    host: _HostTimes,
    recorder: RecordingEngine,
    clock: Callable[[], float],
) -> None:
    left, turn = group.rows, 0
    while left or conductor.has_work():
        if left and (not group.stagger or turn % group.stagger == 0):
            for _ in range(1 if group.stagger else left):
                request = _request(core, group, rng)
                start = clock()
                conductor.submit(request)
                host.submissions.append(clock() - start)
                left -= 1
        num_steps, start = len(recorder.steps), clock()
        conductor.step()
        if len(recorder.steps) == num_steps + 1:
            spent = clock() - start - recorder.step_ms[-1] / 1e3
            host.calls.append((len(recorder.steps[-1].request_ids), spent))
        turn += 1


def _clock_of(core: EngineCore) -> tuple[Callable[[], float], str]:
    """What steps are timed by.  A step that one thread computes takes its CPU time where nobody else computes."""
    if torch.device(core.info.device).type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time, "CPU time"
    return time.perf_counter, "wall time"


def _request(core: EngineCore, group: Group, rng: np.random.Generator) -> EngineRequest:
    length = round(group.prompt_tokens * rng.uniform(1 - SPREAD, 1 + SPREAD))
    prompt = rng.integers(1, core.model.vocab_size, max(length, 1)).astype("<i4")
    tokens = int(rng.integers(TOKENS // 2, TOKENS, endpoint=True))
    return EngineRequest(prompt_ids=prompt.tobytes(), max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"{torch.get_num_threads()} thread(s) of {platform.processor() or platform.machine()}"
