"""``mstar bench offline``: the engine in this process, no server, against the floor and, on request, a peer."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from mstar.cli.assignments import parse_assignments
from mstar.cli.bench.floor import peak_memory_bytes, read_bandwidth, reset_peak_memory, step_bytes
from mstar.cli.bench.peer import ATTENTIONS, TransformersPeer
from mstar.cli.bench.ranges import parse_counts
from mstar.engine.resources.kv.config import PagedKVSpec
from mstar.model.checkpoint import open_checkpoint
from mstar.runtime.core import EngineCore
from mstar.runtime.messages import EngineRequest
from mstar.runtime.options import parse_options


@dataclass(frozen=True)
class Run:
    """One batch from submission to its last token."""

    seconds: float
    step_seconds: float  # median of the steps in which every row decoded
    tokens: np.ndarray  # int64 [rows, output_len]


@dataclass(frozen=True)
class Result:
    """Medians over the repeats of one batch size.  Ratios are to the peer's tok/s in the same run."""

    rows: int
    tokens_per_s: float
    step_ms: float
    floor_ms: float
    peak_mb: float
    peer_tokens_per_s: float | None = None
    ratio: float | None = None
    equal_tokens: float | None = None  # share of rows whose tokens equal the peer's


def offline(
    model: Annotated[str, typer.Option(help="folder, .gguf file, Hugging Face id or alias")] = "smollm2-135m",
    batch_sizes: Annotated[str, typer.Option(help="comma-separated numbers of requests")] = "1,8,32",
    input_len: Annotated[int, typer.Option(min=1, help="prompt tokens per request")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="tokens generated per request; EOS is ignored")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 is one per physical core")] = 0,
    quantised_weights: Annotated[
        str, typer.Option(help="auto computes from a GGUF's quantised blocks where it can; off dequantises at load")
    ] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="measured runs per batch size, after one to warm up")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="seed of the random prompt ids")] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of an engine option, as in config.pbtxt (run_ahead=on); repeat for several."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="run transformers' generate beside every run")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
) -> None:
    """Measure greedy generation: tok/s, ms per decode step, peak memory, and the floor of reading the weights."""
    sizes = parse_counts(batch_sizes, "--batch-sizes")
    given = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "num_threads": threads,
        "quantised_weights": quantised_weights,
        "max_seq_len": input_len + output_len + 1,
        "max_running_requests": max(sizes),
        "max_batch_tokens": max(sizes) * input_len,
        "prefix_cache": False,  # every run has the same prompts
    }
    core = EngineCore(parse_options(given | parse_assignments(option or []))[0])
    peer = TransformersPeer(open_checkpoint(model), core.model.dtype) if compare else None
    bandwidth = read_bandwidth(torch.device(core.info.device))
    results = [measure(core, rows, input_len, output_len, repeats, seed, bandwidth, peer) for rows in sizes]
    _print(core, results, input_len, output_len, bandwidth, peer)
    if json_file:
        record = {
            "engine": msgspec.structs.asdict(core.info),
            "quantised_weights": quantised_weights,
            "input_len": input_len,
            "output_len": output_len,
            "repeats": repeats,
        }
        record |= {"read_bandwidth_gb_s": bandwidth / 1e9, "peer": peer.name if peer else None}
        json_file.write_text(json.dumps(record | {"results": [asdict(result) for result in results]}, indent=1) + "\n")


def measure(
    core: EngineCore,
    rows: int,
    input_len: int,
    output_len: int,
    repeats: int,
    seed: int,
    bandwidth: float,
    peer: TransformersPeer | None,
) -> Result:
    """Runs one batch size; ours and the peer's runs alternate, so that a change of the machine's speed hits both."""
    prompts = np.random.default_rng(seed).integers(1, core.model.vocab_size, size=(rows, input_len), dtype=np.int64)
    run_batch(core, prompts, output_len)
    attention = None if peer is None else _faster_attention(peer, prompts, output_len)
    runs, peer_runs = [], []
    reset_peak_memory()
    for _ in range(repeats):
        runs.append(run_batch(core, prompts, output_len))
        if peer is not None and attention is not None:
            peer_runs.append(peer.generate(prompts, output_len, attention))
    kv_bytes = kv_bytes_per_token(core)
    moved = step_bytes(core.model.weight_bytes, kv_bytes, rows, input_len + output_len / 2)
    result = Result(
        rows=rows,
        tokens_per_s=rows * output_len / statistics.median(run.seconds for run in runs),
        step_ms=statistics.median(run.step_seconds for run in runs) * 1e3,
        floor_ms=moved / bandwidth * 1e3,
        peak_mb=peak_memory_bytes() / 2**20,
    )
    if not peer_runs:
        return result
    peer_rate = rows * output_len / statistics.median(seconds for _, seconds in peer_runs)
    equal = float((runs[0].tokens == peer_runs[0][0]).all(axis=1).mean())
    return Result(
        **asdict(result)
        | {"peer_tokens_per_s": peer_rate, "ratio": result.tokens_per_s / peer_rate, "equal_tokens": equal}
    )


def run_batch(core: EngineCore, prompts: np.ndarray, output_len: int) -> Run:
    """Generates ``output_len`` tokens for every row of ``prompts`` int64 [rows, tokens], all submitted at once."""
    rows = len(prompts)
    start = time.perf_counter()
    place = {
        core.submit(
            EngineRequest(
                prompt_ids=prompt.astype("<i4").tobytes(), max_tokens=output_len, temperature=0.0, ignore_eos=True
            )
        ): index
        for index, prompt in enumerate(prompts)
    }
    tokens = np.zeros((rows, output_len), np.int64)
    count = np.zeros(rows, np.int64)
    steps = []
    while core.has_work():
        before = time.perf_counter()
        report = core.step()
        took = time.perf_counter() - before
        where = np.array([place[request_id] for request_id in report.request_ids.tolist()], np.int64)
        if where.size == rows and count[where].all():
            steps.append(took)
        tokens[where, count[where]] = report.tokens
        count[where] += 1
    seconds = time.perf_counter() - start
    assert (count == output_len).all(), "a row ended early"
    return Run(seconds, statistics.median(steps), tokens)


def _faster_attention(peer: TransformersPeer, prompts: np.ndarray, output_len: int) -> str:
    """The attention implementation with which the peer is faster on these prompts, each warmed up once."""
    seconds = {}
    for attention in ATTENTIONS:
        peer.generate(prompts, min(output_len, 8), attention)
        seconds[attention] = peer.generate(prompts, output_len, attention)[1]
    return min(seconds, key=lambda name: seconds[name])


def kv_bytes_per_token(core: EngineCore) -> float:
    """Bytes of keys and values that one token of context adds over all layers."""
    configs = [spec.config for spec in core.model.resource_specs if isinstance(spec, PagedKVSpec)]
    return sum(config.page_bytes(core.model.kv_dtype.itemsize) / config.page_size for config in configs)


def _print(
    core: EngineCore,
    results: list[Result],
    input_len: int,
    output_len: int,
    bandwidth: float,
    peer: TransformersPeer | None,
) -> None:
    info = core.info
    table = Table(
        title=f"{info.model}, {info.dtype} on {info.device}, {torch.get_num_threads()} threads: {input_len} tokens in, "
        f"{output_len} out, greedy; floor = bytes read at {bandwidth / 1e9:.1f} GB/s"
    )
    headings = ["rows", "tok/s", "ms/step", "floor ms", "% of floor", "peak MB"]
    for heading in headings + ([f"{peer.name} tok/s", "ratio", "rows equal"] if peer else []):
        table.add_column(heading, justify="right")
    for result in results:
        cells = [
            str(result.rows),
            f"{result.tokens_per_s:.1f}",
            f"{result.step_ms:.2f}",
            f"{result.floor_ms:.2f}",
            f"{100 * result.floor_ms / result.step_ms:.0f}",
            f"{result.peak_mb:.0f}",
        ]
        if result.ratio is not None:
            cells += [f"{result.peer_tokens_per_s:.1f}", f"{result.ratio:.2f}", f"{result.equal_tokens:.0%}"]
        table.add_row(*cells)
    Console().print(table)
