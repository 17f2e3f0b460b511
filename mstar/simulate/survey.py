"""Measures the steps of a real engine over many compositions, for a cost model."""

from __future__ import annotations

import dataclasses
import platform
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
from mstar.simulate.host_costs import fit_host
from mstar.simulate.loop_turns import LoopSurvey
from mstar.simulate.measured import MeasuredStep, MeasuredSteps
from mstar.simulate.recording import RecordingEngine
from mstar.simulate.replay_events import ReplayEvents
from mstar.simulate.rig import buckets_of

CONTEXTS = (32, 256, 1024)  # prompt tokens in the middle of a group
TOKENS = 12  # that each request of a group generates, and one more for each step that all prompts together take
FEW = 4  # that come one by one
STAGGER = 3  # steps between arrivals within a group, so that prompts come beside rows that generate
SPREAD = 0.5  # of the middle, to both sides
STEADY_TOKENS = 48  # of all rows together, for the gap between two steps


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


def survey(
    core: EngineCore, most_tokens: int = 4096, repeats: int = 3, seed: int = 0, events: ReplayEvents | None = None
) -> MeasuredSteps:
    """Runs groups of requests through a loaded engine, a step at a time, and measures each step; then a loop in which
    requests come and go, for the host's part.

    On a GPU a step is what its replay takes by the device's clock, and the gap between two replays while nothing
    changes.  Elsewhere it lasts from its launch to its tokens on the host.

    Args:
        core: loaded without running ahead, so that no step waits for another.
        most_tokens: of the prompts of requests that run together; more takes longer.
        repeats: how often all of it runs; of each step the median counts, for other work on a machine comes and goes.
        events: what the core was given as its clock, to time the device by.

    Raises:
        ValueError: it runs ahead, and would measure two steps at once.
    """
    if core.conductor.limits.run_ahead:
        raise ValueError("steps are measured one by one: load the engine with run_ahead=off")
    clock, measured_by = _clock_of(core) if events is None else (time.perf_counter, "the device's time")
    recorder = RecordingEngine(core.engine, clock, events.begin_step if events else lambda: None)
    measure = _Survey(core, recorder, events, most_tokens)
    measure.warm_up(seed)
    rounds = [measure.round(seed) for _ in range(repeats)]
    compositions = [recorder.composition(place) for place in range(len(rounds[0]))]  # those of every round
    medians = np.median(np.array(rounds), axis=0) + (measure.gap_ms(seed) if events else 0.0)
    loop = LoopSurvey(core, recorder, clock, runs_ahead=events is not None)
    turns = loop.turns(np.random.default_rng(seed))
    host = fit_host([turn.launched for turn in turns], np.array([turn.host_us for turn in turns]), loop.request_us)
    kv = next(spec for spec in core.model.resource_specs if isinstance(spec, PagedKVSpec)).config
    token_bytes = kv.page_bytes(core.model.kv_dtype.itemsize) // kv.page_size
    info = core.info
    device = torch.device(info.device)
    how = f"mstar simulate fit, {measured_by}, medians of {repeats}"
    return MeasuredSteps(
        source=f"{info.model}, {info.dtype}, {_machine(info.device)}: {how}",
        device=device.type,
        max_seq_len=info.max_seq_len,
        kv_token_bytes=token_bytes,
        kv_memory_bytes=kv.max_num_pages * kv.page_size * token_bytes,
        host=host,
        steps=[MeasuredStep(*step, taken) for step, taken in zip(compositions, medians.tolist(), strict=True)],
        buckets=buckets_of(core.options, device, info.max_seq_len),
        turns=turns,
        runs_ahead=events is not None,
    )


class _Survey:
    """Groups of requests on one engine."""

    def __init__(
        self, core: EngineCore, recorder: RecordingEngine, events: ReplayEvents | None, most_tokens: int
    ) -> None:
        self._core = core
        self._recorder = recorder
        self._events = events
        self._most_tokens = most_tokens
        self._conductor = Conductor(cast(StepEngine, recorder), core.model, core.conductor.limits)

    def warm_up(self, seed: int) -> None:
        """Buffers, and captures of both kinds."""
        for rows in (1, self._conductor.max_running_requests):
            self._run(self._conductor, Group(rows, CONTEXTS[0], 0), np.random.default_rng(seed), TOKENS)

    def round(self, seed: int) -> list[float]:
        """Milliseconds of each step of all groups; the recorder has the steps."""
        rng = np.random.default_rng(seed)
        self._recorder.clear()
        if self._events:
            self._events.is_on = True
        for group in groups(self._conductor.max_running_requests, self._core.model.max_seq_len, self._most_tokens):
            num_steps = group.rows * group.prompt_tokens // self._conductor.limits.max_batch_tokens
            self._run(self._conductor, group, rng, TOKENS + num_steps)
        return self._recorder.step_ms if self._events is None else self._taken()[0].tolist()

    def gap_ms(self, seed: int) -> float:
        """From the end of one replay to the start of the next, median of steps whose rows stay, which run ahead."""
        limits = dataclasses.replace(self._core.conductor.limits, run_ahead=True)
        conductor = Conductor(cast(StepEngine, self._recorder), self._core.model, limits)
        assert self._events is not None
        self._recorder.clear()
        self._events.is_on = True
        group = Group(conductor.max_running_requests, CONTEXTS[0], 0)
        self._run(conductor, group, np.random.default_rng(seed), STEADY_TOKENS, is_even=True)
        return float(np.median(self._taken()[1]))

    def _taken(self) -> tuple[np.ndarray, np.ndarray]:
        assert self._events is not None
        self._events.is_on = False
        taken = self._events.take()
        assert taken[0].size == len(self._recorder.uses), "a step without a forward"
        return taken

    @torch.inference_mode()  # as the engine's own loop runs
    def _run(
        self, conductor: Conductor, group: Group, rng: np.random.Generator, tokens: int, is_even: bool = False
    ) -> None:
        """``is_even``: all answers have ``tokens``, else up to half of :data:`TOKENS` less."""
        left, turn = group.rows, 0
        while left or conductor.has_work():
            if left and (not group.stagger or turn % group.stagger == 0):
                for _ in range(1 if group.stagger else left):
                    answer = tokens if is_even else int(rng.integers(tokens - TOKENS // 2, tokens, endpoint=True))
                    conductor.submit(self._request(group, rng, answer))
                    left -= 1
            conductor.step()
            turn += 1

    def _request(self, group: Group, rng: np.random.Generator, tokens: int) -> EngineRequest:
        length = round(group.prompt_tokens * rng.uniform(1 - SPREAD, 1 + SPREAD))
        prompt = rng.integers(1, self._core.model.vocab_size, max(length, 1)).astype("<i4")
        return EngineRequest(prompt_ids=prompt.tobytes(), max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _clock_of(core: EngineCore) -> tuple[Callable[[], float], str]:
    """What steps are timed by.  A step that one thread computes takes its CPU time where nobody else computes."""
    if torch.device(core.info.device).type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time, "CPU time"
    return time.perf_counter, "wall time"


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"{torch.get_num_threads()} thread(s) of {platform.processor() or platform.machine()}"
