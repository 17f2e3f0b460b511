"""``mstar simulate``: the real conductor over an engine that only keeps time, for policies and capacity."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mstar.cli.assignments import parse_assignments
from mstar.cli.errors import InputError
from mstar.cli.traces import (
    Options,
    OutputTokens,
    PromptTokens,
    Requests,
    Seed,
    SloItl,
    SloTtft,
    Systems,
    SystemSkew,
    SystemTokens,
    Tenants,
    Together,
    TraceName,
    Versus,
    runs_of,
    trace_maker,
)
from mstar.runtime.core import EngineCore
from mstar.runtime.options import parse_options
from mstar.simulate.drive import simulate
from mstar.simulate.measured import load
from mstar.simulate.measures import Measures
from mstar.simulate.plots import draw
from mstar.simulate.replay_events import ReplayEvents
from mstar.simulate.report_text import costs_text, errors_text, summary_text
from mstar.simulate.rig import Rig, build_rig
from mstar.simulate.summary import Slo, Summary, summarise
from mstar.simulate.survey import survey
from mstar.simulate.synthetic import Ask
from mstar.simulate.trace import write_trace
from mstar.utils.errors import MstarError


def run(
    trace: TraceName = "poisson",
    steps: Annotated[str, typer.Option(help="measured steps: a shipped name, or a .json file")] = "h200-qwen3-0.6b",
    requests: Requests = 2_000,
    rate: Annotated[float, typer.Option(min=1e-6, help="requests per second on average")] = 50.0,
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 128,
    systems: Systems = 8,
    system_tokens: SystemTokens = 1_000,
    system_skew: SystemSkew = 0.0,
    together: Together = 1,
    tenants: Tenants = 1,
    seed: Seed = 0,
    slo_ttft_ms: SloTtft = 500.0,
    slo_itl_ms: SloItl = 50.0,
    option: Options = None,
    versus: Versus = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw latencies and queue into this .png, .svg or .pdf")] = None,
    save_trace: Annotated[Path | None, typer.Option(help="write the trace to this .jsonl file")] = None,
) -> None:
    """Play a trace through the real conductor in virtual time."""
    for file, flag in ((json_file, "--json"), (plot, "--plot"), (save_trace, "--save-trace")):
        if file and not file.parent.is_dir():
            raise InputError(f"{flag}: {file.parent} is no folder")
    measured = load(steps)
    runs = runs_of("simulated", option or [], versus or [])
    pyplot = _pyplot() if plot else None
    context = min(options.max_seq_len or measured.max_seq_len for options in runs.values())
    ask = Ask(
        requests, rate, prompt_tokens, output_tokens, context, seed, systems, system_tokens, system_skew, together
    )
    played = trace_maker(trace, tenants)(ask)
    rigs = {name: build_rig(options, measured, played) for name, options in runs.items()}
    if save_trace:
        write_trace(played, save_trace)
    print(f"steps of {measured.source}\nfitted to them, error of a step:\n{errors_text(measured.errors())}")
    slo, seen, results = Slo(slo_ttft_ms, slo_itl_ms), {}, {}
    for name, rig in rigs.items():
        seen[name], results[name] = _play(rig, slo, name)
    if json_file:
        json_file.write_text(json.dumps({name: each.as_json() for name, each in results.items()}, indent=1) + "\n")
    if plot:
        draw(pyplot, seen, plot)


def fit(
    out: Annotated[Path, typer.Option(help="the .json file to write")],
    model: Annotated[str, typer.Option(help="folder, .gguf file, Hugging Face id or alias")] = "smollm2-135m",
    option: Options = None,
    tokens: Annotated[
        int, typer.Option(min=32, help="prompt tokens of requests that run together at most; a GPU takes 262144")
    ] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="measured runs; of each step the median counts")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="of the random prompts")] = 0,
) -> None:
    """Measure the steps of a real engine on this machine, for simulations of it."""
    if out.suffix != ".json" or not out.parent.is_dir():
        raise InputError(f"--out: a .json file in a folder that exists, got {out}")
    fixed = {"model": model, "run_ahead": "off", "prefix_cache": False}
    events = ReplayEvents()
    core = EngineCore(parse_options(parse_assignments(option or []) | fixed)[0], events)
    gc.collect()
    gc.freeze()  # as an engine process: a collection over the model's objects would show as a slow step
    measured = survey(core, tokens, repeats, seed, events if core.engine.device.type == "cuda" else None)
    measured.save(out)
    print(f"{len(measured.steps)} steps of {measured.source}: {out}")
    print(f"error of a step:\n{errors_text(measured.errors())}")
    print(costs_text(measured.cost_model(), measured.host))


def _play(rig: Rig, slo: Slo, name: str) -> tuple[Measures, Summary]:
    measures = Measures(rig.trace, int(slo.itl_ms * 1e6))
    start = time.perf_counter()
    simulate(rig, measures)
    seconds = time.perf_counter() - start
    summary = summarise(rig.played(), measures, slo)
    steps = sum(measures.steps.values())
    speed = f"{len(rig.trace) / seconds:,.0f} requests/s, {steps / seconds:,.0f} steps/s"
    print(f"\n{name}, simulated in {seconds:.1f} s: {speed}")
    print(summary_text(summary))
    return measures, summary


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MstarError(f"--plot needs matplotlib (pip install 'mstar-triton[plot]'): {error}") from error
    return pyplot
