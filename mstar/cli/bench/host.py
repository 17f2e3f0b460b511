"""``mstar bench host``: what a step costs the host, phase by phase, with a forward that computes next to nothing."""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from mstar.cli.bench.ranges import parse_counts
from mstar.cli.bench.stub_model import CONTEXT, VOCABULARY, stub_core
from mstar.cli.errors import InputError
from mstar.conductor.conductor import Conductor
from mstar.conductor.request import EngineRequest
from mstar.engine.phase_clock import PhaseClock
from mstar.runtime.messages import Submit, decode_to_engine, encode
from mstar.runtime.outgoing import by_client
from mstar.utils import knobs

LIFETIME = 256  # most tokens of a request
UNIT_STEPS = 32  # between two measurements of the unit
PROMPT_TOKENS = 16
PROMPTS = 4096  # different ones
MOST_ROWS = 4096
REPLAY = "replay"
# The phases that are the conductor's own code, with the messages in and out; all others are the engine's.
CONDUCTOR = ("arrivals", "join", "schedule", "routing", "post_process", "ends", "message")
CALLS = 1000  # empty Python calls in a unit

# The fastest settings of the switches that concern the host.  The environment goes first.
FASTEST = {
    "MSTAR_DEVICE_LOOPBACK": "1",
    "MSTAR_INGRAPH_DECODE_ROPE": "1",
    "MSTAR_KV_CHAIN_LAZY_STEPS": "64",
    "MSTAR_KV_PLAN_CACHE": "1",
    "MSTAR_SAMPLER_INGRAPH_SCATTER": "1",
}


@dataclass(frozen=True)
class HostCost:
    """Mean microseconds per step.  ``host_us`` is the loop's wall time without the replay, ``phases_us`` its parts.

    ``waiting`` requests stood in the queue while ``rows`` ran.  ``share`` of the wall time the thread had a processor;
    the rest is in none of these numbers.
    """

    rows: int
    waiting: int
    steps: int
    phases_us: dict[str, float]
    host_us: float
    replay_us: float
    unit_us: float
    share: float

    @property
    def units(self) -> float:
        return self.host_us / self.unit_us

    @property
    def conductor_us(self) -> float:
        """The conductor's part of ``phases_us``."""
        return sum(self.phases_us.get(name, 0.0) for name in CONDUCTOR)

    @property
    def engine_us(self) -> float:
        """The rest of ``phases_us``."""
        return sum(self.phases_us.values()) - self.conductor_us

    @property
    def covered(self) -> float:
        """Share of ``host_us`` that the phases account for."""
        return sum(self.phases_us.values()) / self.host_us


def host(
    rows: Annotated[str, typer.Option(help="comma-separated numbers of running requests")] = "1,16,64,128,256",
    waiting: Annotated[int, typer.Option(min=0, help="requests that wait in the queue meanwhile")] = 0,
    steps: Annotated[int, typer.Option(min=UNIT_STEPS, help="measured steps per number of rows")] = 1024,
    turn: Annotated[
        int, typer.Option(min=1, max=LIFETIME, help="steps from one group of rows that leaves and joins to the next")
    ] = 32,
    settings: Annotated[
        str, typer.Option(help="fastest sets the host's switches; environment leaves them")
    ] = "fastest",
    run_ahead: Annotated[bool, typer.Option(help="launch a step before the tokens of the last are read")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
) -> None:
    """Measure the host's share of a step: the real conductor, engine and resources around a stub decoder."""
    sizes = parse_counts(rows, "--rows")
    if settings not in ("fastest", "environment"):
        raise typer.BadParameter(f"fastest or environment, got {settings!r}", param_hint="--settings")
    if settings == "fastest":
        os.environ.update({name: value for name, value in FASTEST.items() if name not in os.environ})
    if max(sizes) > MOST_ROWS:
        raise typer.BadParameter(f"at most {MOST_ROWS}, got {max(sizes)}", param_hint="--rows")
    try:
        knobs.check_all()
    except ValueError as error:
        raise InputError(str(error)) from None
    if json_file and not json_file.parent.is_dir():
        raise InputError(f"--json: {json_file.parent} is no folder")
    torch.set_num_threads(1)
    results = [measure(count, steps, run_ahead, waiting, turn) for count in sizes]
    _print(results, run_ahead)
    if json_file:
        json_file.write_text(json.dumps([_record(result) for result in results], indent=1) + "\n")


@torch.inference_mode()  # as the engine's own loop runs
def measure(rows: int, steps: int, run_ahead: bool, waiting: int = 0, turn: int = 32) -> HostCost:
    """Runs ``rows`` requests at a time through a stub model while ``waiting`` more stand in the queue.

    Every ``turn`` steps a group of rows leaves, as many join from the head of the queue, and as many arrive at its end.
    A request's life is 256 tokens, or a turn for each row where those are fewer.
    """
    clock = PhaseClock()
    conductor = stub_core(rows, waiting, run_ahead, clock)
    cohorts = min(LIFETIME // turn, rows)
    lifetime = turn * cohorts
    arrivals = _Arrivals(conductor, lifetime)
    for cohort in range(cohorts):  # staggered: the first lives are cut short
        arrivals.submit(len(range(cohort, rows, cohorts)), turn * (cohort + 1))
    arrivals.submit(waiting)
    for _ in range(lifetime):
        _loop_once(conductor, arrivals, clock)
    spent: defaultdict[str, float] = defaultdict(float)  # seconds, by phase
    host = wall = 0.0
    units = []
    gc.collect()
    gc.disable()
    try:
        for step in range(steps):
            if step % UNIT_STEPS == 0:
                units.append(_unit_us())  # in between, so that a busy machine slows both alike
            phases, took, had = _timed_step(conductor, arrivals, clock)
            for name, seconds in phases.items():
                spent[name] += seconds
            host += had
            wall += took
    finally:
        gc.enable()
    phases_us = {name: seconds / steps * 1e6 for name, seconds in spent.items()}
    replay_us = phases_us.pop(REPLAY)
    unit_us = statistics.median(units)
    return HostCost(rows, waiting, steps, phases_us, host / steps * 1e6 - replay_us, replay_us, unit_us, host / wall)


def _timed_step(conductor: Conductor, arrivals: _Arrivals, clock: PhaseClock) -> tuple[dict[str, float], float, float]:
    """One step: seconds by phase, wall time, and how much of that the thread had a processor.

    Where others had it meanwhile, all phases of the step are cut alike, so that they add up to what it had.
    """
    busy = time.thread_time()
    start = time.perf_counter()
    clock.reset()
    _loop_once(conductor, arrivals, clock)
    wall = time.perf_counter() - start
    had = min(time.thread_time() - busy, wall)
    return {name: seconds * had / wall for name, seconds in clock.seconds.items()}, wall, had


class _Arrivals:
    """Replaces requests that ended, as clients would, by messages that were made off the clock."""

    def __init__(self, conductor: Conductor, lifetime: int) -> None:
        self._conductor = conductor
        self._lifetime = lifetime
        self._prompts = np.random.default_rng(0).integers(0, VOCABULARY, (PROMPTS, PROMPT_TOKENS), dtype=np.int32)
        self._messages = itertools.cycle(self._of(lifetime))

    def submit(self, count: int, tokens: int | None = None) -> None:
        """``tokens``: how many each generates; None is a whole life."""
        for frame in itertools.islice(self._messages if tokens is None else self._of(tokens), count):
            message = decode_to_engine(frame)
            assert isinstance(message, Submit)
            self._conductor.submit(message.request)

    def _of(self, tokens: int) -> list[bytes]:
        limit = min(tokens, CONTEXT - PROMPT_TOKENS)
        requests = (
            EngineRequest(prompt_ids=prompt.tobytes(), max_tokens=limit, temperature=0.0) for prompt in self._prompts
        )
        return [encode(Submit(0, request)) for request in requests]


def _loop_once(conductor: Conductor, arrivals: _Arrivals, clock: PhaseClock) -> None:
    report = conductor.step()
    ended = 0
    for _, tickets, message in by_client(report):
        encode(message)
        ended += len(tickets)
    clock.mark("message")
    if ended:
        arrivals.submit(ended)
        clock.mark("arrivals")


def _unit_us() -> float:
    """Microseconds of 1,000 calls of an empty Python function."""

    def empty() -> None:
        return None

    start = time.perf_counter()
    for _ in range(CALLS):
        empty()
    return (time.perf_counter() - start) * 1e6


def _record(result: HostCost) -> dict[str, object]:
    own = {"units": result.units, "conductor_us": result.conductor_us, "engine_us": result.engine_us}
    return vars(result) | own


def _print(results: list[HostCost], run_ahead: bool) -> None:
    mode = "run-ahead" if run_ahead else "one step at a time"
    waiting = results[0].waiting
    table = Table(title=f"host µs per step, {mode}, {waiting} waiting; 1 unit = {CALLS} empty Python calls")
    table.add_column("rows")
    for result in results:
        table.add_column(str(result.rows), justify="right")
    names = dict.fromkeys(name for result in results for name in result.phases_us)
    for is_own in (True, False):
        for name in names:
            if (name in CONDUCTOR) == is_own:
                table.add_row(name, *(f"{result.phases_us.get(name, 0.0):.1f}" for result in results))
        part = [result.conductor_us if is_own else result.engine_us for result in results]
        label = "the conductor" if is_own else "the engine"
        table.add_row(label, *(f"{spent:.1f}" for spent in part), style="bold")
        units = (f"{spent / result.unit_us:.2f}" for spent, result in zip(part, results, strict=True))
        table.add_row(f"{label}, units", *units, style="bold")
        table.add_section()
    table.add_row("loop less replay", *(f"{result.host_us:.1f}" for result in results))
    table.add_row("phases / loop", *(f"{result.covered:.1%}" for result in results))
    table.add_row("unit, µs", *(f"{result.unit_us:.1f}" for result in results))
    table.add_row("units", *(f"{result.units:.2f}" for result in results))
    table.add_row("processor / wall", *(f"{result.share:.1%}" for result in results))
    table.add_row("replay (not counted)", *(f"{result.replay_us:.1f}" for result in results))
    Console().print(table)
