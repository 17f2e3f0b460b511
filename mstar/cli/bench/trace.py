"""``mstar bench trace``: the traces of ``mstar simulate`` on the real engine, in real time, without a server."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from mstar.cli.bench.ranges import parse_numbers
from mstar.cli.bench.text_table import text_table
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
from mstar.simulate.live import Live, load_engines
from mstar.simulate.real_time import CpuClock, RealClock, WallClock
from mstar.simulate.report_text import summary_text
from mstar.simulate.summary import Slo, Summary, summarise
from mstar.simulate.synthetic import Ask
from mstar.simulate.trace import Trace

HEADINGS = (
    "trace", "options", "in time/s", "least", "most", "ratio", "in time", "tok/s",
    "first ms, p50", "p99", "gap ms, p50", "p99",
)  # fmt: skip
CLOCKS: Mapping[str, Callable[[], RealClock]] = {"wall": WallClock, "cpu": CpuClock}
NAME_WIDTH = 40  # of options in the table


class Result(NamedTuple):
    """One run of a trace with the options of that name."""

    trace: str
    options: str
    repeat: int
    summary: Summary


def trace(
    model: Annotated[str, typer.Option(help="folder, .gguf file, Hugging Face id or alias")] = "smollm2-135m",
    trace: TraceName = "poisson",
    requests: Requests = 200,
    rate: Annotated[
        str, typer.Option(help="requests per second on average; several by comma, one after another")
    ] = "1",
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 128,
    systems: Systems = 8,
    system_tokens: SystemTokens = 1_000,
    system_skew: SystemSkew = 0.0,
    together: Together = 1,
    tenants: Tenants = 1,
    seed: Seed = 0,
    slo_ttft_ms: SloTtft = 5_000.0,
    slo_itl_ms: SloItl = 200.0,
    option: Options = None,
    versus: Versus = None,
    clock: Annotated[
        str, typer.Option(help="wall; or cpu: processor time, for one thread on a CPU that others use too")
    ] = "wall",
    repeats: Annotated[int, typer.Option(min=1, help="runs of each; those to compare take turns")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
) -> None:
    """Play a trace on the engine in this process in real time, and report as mstar simulate does.

    All engines to compare are loaded before the first run; those that differ in options of scheduling alone are one.
    Answers are as long as the trace says, whatever the model would have said.
    """
    if json_file and not json_file.parent.is_dir():
        raise InputError(f"--json: {json_file.parent} is no folder")
    rates, make = parse_numbers(rate, "--rate"), trace_maker(trace, tenants)
    if clock not in CLOCKS:
        raise InputError(f"--clock: {' or '.join(CLOCKS)}, got {clock!r}")
    options = runs_of(model, option or [], versus or [])
    if clock == "cpu" and not all(each.device == "cpu" and each.num_threads == 1 for each in options.values()):
        raise InputError("--clock cpu: for --option device=cpu --option num_threads=1 alone")
    engines = load_engines(options, CLOCKS[clock]())
    for name, engine in engines.items():
        print(f"{name}: {engine.info.model}, {engine.info.dtype} on {engine.info.device}", flush=True)
    context = min(engine.info.max_seq_len for engine in engines.values())
    ask = Ask(
        requests, rates[0], prompt_tokens, output_tokens, context, seed, systems, system_tokens, system_skew, together
    )
    asks = [replace(ask, rate=each) for each in rates]
    if trace.endswith(".jsonl"):
        traces = {Path(trace).name: make(asks[0])}
    else:
        traces = {f"{ask.rate:g}/s": make(ask) for ask in asks}
    results = []
    for result in play_all(engines, traces, Slo(slo_ttft_ms, slo_itl_ms), repeats):
        results.append(result)
        print(f"\n{result.trace}, {result.options}, run {result.repeat + 1} of {repeats}")
        print(summary_text(result.summary), flush=True)
    print(f"\n{table(results, next(iter(engines)))}")
    if json_file:
        described = {name: msgspec.structs.asdict(engine.info) for name, engine in engines.items()}
        json_file.write_text(json.dumps({"engines": described, "runs": [*map(_plain, results)]}, indent=1) + "\n")


def play_all(engines: Mapping[str, Live], traces: Mapping[str, Trace], slo: Slo, repeats: int) -> Iterable[Result]:
    """Each trace on each engine, ``repeats`` times.  The engines take turns, every other time in the reverse order, so
    that a change of the machine's speed hits all."""
    for engine in engines.values():
        engine.warm_up(next(iter(traces.values())))
    for label, played in traces.items():
        for repeat in range(repeats):
            for name in [*engines][:: -1 if repeat % 2 else 1]:
                measures, run = engines[name].play(played, int(slo.itl_ms * 1e6))
                yield Result(label, name, repeat, summarise(run, measures, slo))


def table(results: list[Result], first: str) -> str:
    """A line for each trace and options: medians over the repeats, the least and the most requests in time per second;
    ``ratio``: of these to those of the options ``first`` in the same repeat."""
    goodput = {(each.trace, each.options, each.repeat): each.summary.goodput for each in results}
    rows = []
    for label, name in dict.fromkeys((each.trace, each.options) for each in results):
        runs = [each for each in results if (each.trace, each.options) == (label, name)]
        ratios = [_ratio(each.summary.goodput, goodput[label, first, each.repeat]) for each in runs]
        summaries = [each.summary for each in runs]
        in_time = [each.goodput for each in summaries]
        medians = (
            (statistics.median(each.in_time for each in summaries), ".0%"),
            (statistics.median(each.tokens_per_s for each in summaries), ",.0f"),
            (statistics.median(each.ttft.p50 for each in summaries), ",.1f"),
            (statistics.median(each.ttft.p99 for each in summaries), ",.1f"),
            (statistics.median(each.itl.p50 for each in summaries), ",.2f"),
            (statistics.median(each.itl.p99 for each in summaries), ",.2f"),
        )
        cells = [format(value, ",.2f") for value in (statistics.median(in_time), min(in_time), max(in_time))]
        cells += [format(statistics.median(ratios), ".2f"), *(format(*each) for each in medians)]
        rows.append([label, name[:NAME_WIDTH], *cells])
    return text_table("medians of the repeats", HEADINGS, rows)


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float("nan")


def _plain(result: Result) -> dict[str, Any]:
    return result._asdict() | {"summary": result.summary.as_json()}
