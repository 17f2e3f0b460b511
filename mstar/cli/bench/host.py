"""``mstar bench host``: what a step costs the host, phase by phase, with a forward that computes next to nothing."""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import time
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
from mstar.runtime.messages import encode
from mstar.runtime.outgoing import by_client
from mstar.utils import knobs

CHURN_STEPS = 32  # between two groups of rows that leave and join
COHORTS = 8
PROMPT_TOKENS = 16
PROMPTS = 4096  # different ones
MOST_ROWS = 4096
REPLAY = "replay"
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
    """Mean microseconds per step.  ``host_us`` is the loop's wall time without the replay, ``phases_us`` its parts."""

    rows: int
    steps: int
    phases_us: dict[str, float]
    host_us: float
    replay_us: float
    unit_us: float

    @property
    def units(self) -> float:
        return self.host_us / self.unit_us

    @property
    def covered(self) -> float:
        """Share of ``host_us`` that the phases account for."""
        return sum(self.phases_us.values()) / self.host_us


def host(
    rows: Annotated[str, typer.Option(help="comma-separated numbers of running requests")] = "1,16,64,128,256",
    steps: Annotated[int, typer.Option(min=CHURN_STEPS, help="measured steps per number of rows")] = 1024,
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
    results = [measure(count, steps, run_ahead) for count in sizes]
    _print(results, run_ahead)
    if json_file:
        json_file.write_text(
            json.dumps([vars(result) | {"units": result.units} for result in results], indent=1) + "\n"
        )


@torch.inference_mode()  # as the engine's own loop runs
def measure(rows: int, steps: int, run_ahead: bool) -> HostCost:
    """Runs ``rows`` requests at a time through a stub model; a group of them leaves and joins every 32 steps."""
    clock = PhaseClock()
    conductor = stub_core(rows, run_ahead, clock)
    cohorts = min(COHORTS, rows)
    lifetime = CHURN_STEPS * cohorts
    waiting = _Arrivals(conductor, lifetime)
    for cohort in range(cohorts):  # staggered: the first lives are cut short
        waiting.submit(len(range(cohort, rows, cohorts)), CHURN_STEPS * (cohort + 1))
    for _ in range(lifetime):
        _loop_once(conductor, waiting, clock)
    wall, units = 0.0, []
    gc.collect()
    gc.disable()
    try:
        clock.reset()
        for first in range(0, steps, CHURN_STEPS):
            units.append(_unit_us())  # in between, so that a busy machine slows both alike
            start = time.perf_counter()
            clock.start()
            for _ in range(min(CHURN_STEPS, steps - first)):
                _loop_once(conductor, waiting, clock)
            wall += time.perf_counter() - start
    finally:
        gc.enable()
    phases = {name: seconds / steps * 1e6 for name, seconds in clock.seconds.items()}
    replay = phases.pop(REPLAY)
    return HostCost(rows, steps, phases, wall / steps * 1e6 - replay, replay, statistics.median(units))


class _Arrivals:
    """Replaces requests that ended, as clients would."""

    def __init__(self, conductor: Conductor, lifetime: int) -> None:
        self._conductor = conductor
        self._lifetime = lifetime
        prompts = np.random.default_rng(0).integers(0, VOCABULARY, (PROMPTS, PROMPT_TOKENS), dtype=np.int32)
        self._prompts = itertools.cycle([prompt.tobytes() for prompt in prompts])  # made here, off the clock

    def submit(self, count: int, tokens: int | None = None) -> None:
        for _ in range(count):
            limit = min(tokens or self._lifetime, CONTEXT - PROMPT_TOKENS)
            self._conductor.submit(EngineRequest(prompt_ids=next(self._prompts), max_tokens=limit, temperature=0.0))


def _loop_once(conductor: Conductor, waiting: _Arrivals, clock: PhaseClock) -> None:
    report = conductor.step()
    ended = 0
    for _, tickets, message in by_client(report):
        encode(message)
        ended += len(tickets)
    clock.mark("message")
    if ended:
        waiting.submit(ended)
        clock.mark("arrivals")


def _unit_us() -> float:
    """Microseconds of 1,000 calls of an empty Python function."""

    def empty() -> None:
        return None

    start = time.perf_counter()
    for _ in range(CALLS):
        empty()
    return (time.perf_counter() - start) * 1e6


def _print(results: list[HostCost], run_ahead: bool) -> None:
    mode = "run-ahead" if run_ahead else "one step at a time"
    table = Table(title=f"host microseconds per step, {mode}; 1 unit = {CALLS} empty Python calls")
    table.add_column("rows")
    for result in results:
        table.add_column(str(result.rows), justify="right")
    for name in dict.fromkeys(name for result in results for name in result.phases_us):
        table.add_row(name, *(f"{result.phases_us.get(name, 0.0):.1f}" for result in results))
    table.add_section()
    table.add_row("host, all phases", *(f"{sum(result.phases_us.values()):.1f}" for result in results))
    table.add_row("loop less replay", *(f"{result.host_us:.1f}" for result in results))
    table.add_row("phases / loop", *(f"{result.covered:.1%}" for result in results))
    table.add_row("unit, µs", *(f"{result.unit_us:.1f}" for result in results))
    table.add_row("units", *(f"{result.units:.2f}" for result in results))
    table.add_row("replay (not counted)", *(f"{result.replay_us:.1f}" for result in results))
    Console().print(table)
