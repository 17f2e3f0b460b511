"""``mstar bench sampler``: what sampling adds to a decode step, each feature alone and all together."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from mstar.cli.bench.engine_run import run_workload
from mstar.cli.bench.ranges import parse_counts
from mstar.cli.bench.sampling_rig import SamplingRig
from mstar.cli.bench.workloads import equal_rows
from mstar.cli.errors import InputError
from mstar.engine.resources.grammar.config import GrammarReqConfig
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig
from mstar.engine.resources.logprobs.config import LogprobsReqConfig
from mstar.engine.resources.sampler.config import SamplingReqConfig
from mstar.engine.resources.spec import ResourceReqConfig
from mstar.runtime.core import EngineCore
from mstar.runtime.options import parse_options

PROMPT_TOKENS, DECODE_STEPS = 64, 8  # of the model's own step
SMALLEST_VOCABULARY = 256  # single bytes: all that the features below name
IDS = np.arange(100, 200)
DIGITS = GrammarReqConfig(kind="regex", text="[0-9 ]+", ignore_eos=True)  # never at its end


def _sampler(**settings: object) -> dict[str, ResourceReqConfig]:
    return {"sampler": SamplingReqConfig(**({"temperature": 0.8} | settings))}  # type: ignore[arg-type]


def _greedy(**others: ResourceReqConfig) -> dict[str, ResourceReqConfig]:
    return {"sampler": SamplingReqConfig(temperature=0)} | others


_BIAS = {"bias_ids": IDS, "bias": np.full(IDS.size, 2, np.float32)}
# What each request of a batch asks for.  Sampled ones have temperature 0.8, the others are greedy.
FEATURES: dict[str, Mapping[str, ResourceReqConfig]] = {
    "greedy": _greedy(),
    "temperature": _sampler(),
    "top_k 50": _sampler(top_k=50),
    "top_p 0.95": _sampler(top_p=0.95),
    "min_p 0.05": _sampler(min_p=0.05),
    "top_k, top_p, min_p": _sampler(top_k=50, top_p=0.95, min_p=0.05),
    "min_tokens": _sampler(temperature=0, min_tokens=10**6),
    "repetition_penalty": _sampler(temperature=0, repetition_penalty=1.2),
    "repetition_window 64": _sampler(temperature=0, repetition_penalty=1.2, repetition_window=64),
    "presence and frequency": _greedy(logit_edits=LogitEditsReqConfig(presence_penalty=0.5, frequency_penalty=0.5)),
    "logit_bias, 100 ids": _greedy(logit_edits=LogitEditsReqConfig(**_BIAS)),  # type: ignore[arg-type]
    "bad_words, 3": _greedy(logit_edits=LogitEditsReqConfig(bad_words=((5,), (6, 7), (8, 9, 10)))),
    "allowed_token_ids, 100": _greedy(logit_edits=LogitEditsReqConfig(allowed_ids=IDS)),
    "regex": _greedy(grammar=DIGITS),
    "logprobs 0": _greedy(logprobs=LogprobsReqConfig(num_top=0)),
    "logprobs 20": _greedy(logprobs=LogprobsReqConfig(num_top=20)),
    "all of it": {
        **_sampler(top_k=50, top_p=0.95, min_p=0.05, min_tokens=10**6, repetition_penalty=1.2),
        "logit_edits": LogitEditsReqConfig(
            bad_words=((5,), (6, 7)),
            presence_penalty=0.5,
            frequency_penalty=0.5,
            **_BIAS,  # type: ignore[arg-type]
        ),
        "grammar": DIGITS,
        "logprobs": LogprobsReqConfig(num_top=20),
    },
}


@dataclass(frozen=True)
class Cost:
    """Milliseconds per step over ``vocab_size`` logits, by feature.  ``decode_ms``: the model's whole greedy step."""

    rows: int
    vocab_size: int
    ms: dict[str, float]
    decode_ms: float | None = None


def sampler(
    rows: Annotated[str, typer.Option(help="comma-separated numbers of rows")] = "1,64,256",
    vocabularies: Annotated[str, typer.Option(help="comma-separated sizes of vocabularies")] = "49152,151936",
    steps: Annotated[int, typer.Option(min=3, help="measured steps, of which the median counts")] = 21,
    model: Annotated[
        str, typer.Option(help="a model whose decode steps to measure beside, for its own vocabulary; empty for none")
    ] = "smollm2-135m",
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
) -> None:
    """Measure sampling by itself on the CPU: every feature on every row of a batch, beside a model's decode step."""
    sizes, vocabs = parse_counts(rows, "--rows"), parse_counts(vocabularies, "--vocabularies")
    if min(vocabs) < SMALLEST_VOCABULARY:
        raise typer.BadParameter(f"at least {SMALLEST_VOCABULARY}, got {min(vocabs)}", param_hint="--vocabularies")
    if json_file and not json_file.parent.is_dir():
        raise InputError(f"--json: {json_file.parent} is no folder")
    decode = decode_seconds(model, sizes) if model else {}
    results = [measure(count, vocab, steps, decode.get((vocab, count))) for vocab in vocabs for count in sizes]
    for vocab in vocabs:
        _print([result for result in results if result.vocab_size == vocab], model)
    if json_file:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def measure(rows: int, vocab_size: int, steps: int, decode_s: float | None) -> Cost:
    """Every feature at one batch size; a rig of its own for each, so that none inherits another's memory."""
    ms = {}
    for name, configs in FEATURES.items():
        rig = SamplingRig(rows, vocab_size)
        ms[name] = statistics.median(rig.step_seconds(configs, steps)) * 1e3
    return Cost(rows, vocab_size, ms, None if decode_s is None else decode_s * 1e3)


def decode_seconds(model: str, sizes: list[int]) -> dict[tuple[int, int], float]:
    """Seconds of a whole greedy decode step, by vocabulary and rows."""
    given = {
        "model": model,
        "device": "cpu",
        "max_seq_len": PROMPT_TOKENS + DECODE_STEPS + 2,
        "max_running_requests": max(sizes),
        "max_batch_tokens": max(sizes) * PROMPT_TOKENS,  # all rows decode together from their first token on
        "prefix_cache": False,
    }
    core = EngineCore(parse_options(given)[0])
    found = {}
    for rows in sizes:
        workload = equal_rows(rows, PROMPT_TOKENS, 1 + DECODE_STEPS, core.model.vocab_size, seed=0)
        run_workload(core, workload)  # to warm up
        found[core.model.vocab_size, rows] = run_workload(core, workload).step_seconds
    return found


def _print(results: list[Cost], model: str) -> None:
    table = Table(
        title=f"sampling, ms per step over {results[0].vocab_size:,} logits, {torch.get_num_threads()} threads; "
        "% of the whole greedy step"
    )
    table.add_column("on every row")
    for result in results:
        table.add_column(f"{result.rows} rows", justify="right")
    for name in FEATURES:
        table.add_row(name, *(_cell(result.ms[name], result.decode_ms) for result in results))
    if any(result.decode_ms is not None for result in results):
        table.add_section()
        table.add_row(f"greedy step of {model}", *(_cell(result.decode_ms or 0.0, None) for result in results))
    Console().print(table)


def _cell(ms: float, decode_ms: float | None) -> str:
    return f"{ms:.2f}" + (f" ({ms / decode_ms:.0%})" if decode_ms else "")
