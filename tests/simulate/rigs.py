"""Simulations small enough for a test."""

from __future__ import annotations

from mstar.runtime.options import EngineOptions
from mstar.simulate.composition import Composition
from mstar.simulate.drive import simulate
from mstar.simulate.host_costs import HostCosts
from mstar.simulate.measured import MeasuredStep, MeasuredSteps
from mstar.simulate.measures import Measures
from mstar.simulate.rig import Rig, build_rig
from mstar.simulate.trace import Trace

CONTEXT = 256
DEFAULTS = {"model": "simulated", "max_running_requests": 8, "max_batch_tokens": 64, "page_size": 8}


def step_ms(step: Composition) -> float:
    """What the device of these tests takes, made up."""
    return 1.0 + 0.1 * (step.decode_rows + step.prompt_rows) + 0.02 * step.prompt_tokens + 0.001 * step.decode_context


def measured(device: str = "cuda") -> MeasuredSteps:
    """Steps of that device, of all kinds."""
    steps = []
    for rows in range(33):
        for context in (10, 100, 200):
            for prompts in (0, 1, 3):
                tokens = prompts * context
                step = Composition(rows, rows * context, prompts, tokens, tokens * (context + 1) // 2)
                if rows or prompts:
                    steps.append(MeasuredStep(*step, round(step_ms(step), 4)))
    return MeasuredSteps("made up", device, CONTEXT, 4, 1 << 20, HostCosts(100.0, 1.0, 50.0), steps)


def options(**given: object) -> EngineOptions:
    return EngineOptions(**DEFAULTS | given)  # type: ignore[arg-type]


def play(trace: Trace, device: str = "cuda", itl_bound_ms: float = 5.0, **given: object) -> tuple[Rig, Measures]:
    """A trace from its beginning to its end."""
    rig = build_rig(options(**given), measured(device), trace)
    measures = Measures(trace, int(itl_bound_ms * 1e6))
    simulate(rig, measures)
    return rig, measures
