"""``mstar bench serve``: load on a running server over gRPC streams, swept over concurrency."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from mstar.cli.bench.ranges import parse_counts
from mstar.utils.errors import MstarError

PERCENTILES = (50, 90, 99)


@dataclass
class Trace:
    """One request as its client saw it.  Times in seconds on the client's monotonic clock."""

    sent: float
    arrivals: list[float] = field(default_factory=list)  # one per response that carried tokens
    tokens: list[int] = field(default_factory=list)  # tokens of each of those responses
    finished: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Level:
    """What one concurrency delivered.  Times in milliseconds; percentiles in the order of ``PERCENTILES``."""

    concurrency: int
    requests: int
    errors: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    e2e_ms: tuple[float, ...]
    tokens_per_response: float


def serve(
    model: Annotated[str, typer.Option(help="model name in the repository")] = "smollm2",
    url: Annotated[str, typer.Option(help="gRPC address of the server")] = "localhost:8001",
    concurrency: Annotated[str, typer.Option(help="comma-separated numbers of requests in flight")] = "1,8,32",
    requests: Annotated[int, typer.Option(min=1, help="requests per concurrency (at least one per stream)")] = 32,
    input_len: Annotated[int, typer.Option(min=1, help="prompt tokens per request")] = 64,
    output_len: Annotated[int, typer.Option(min=1, help="tokens generated per request; EOS is ignored")] = 64,
    max_token_id: Annotated[int, typer.Option(min=2, help="prompt ids are drawn below this id")] = 4096,
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
    png: Annotated[Path | None, typer.Option(help="also plot the sweep to this file (extra: plot)")] = None,
) -> None:
    """Sweep concurrency against a running server and print throughput, TTFT and inter-token percentiles."""
    levels = []
    for count in parse_counts(concurrency, "--concurrency"):
        total = max(requests, count)
        rng = np.random.default_rng(seed)
        prompts = rng.integers(1, max_token_id, size=(total, input_len), dtype=np.int32)
        traces, seconds = asyncio.run(_run_level(url, model, prompts, output_len, count))
        levels.append(summarise(count, traces, seconds))
    _print(levels, input_len, output_len)
    if json_file:
        record = {"model": model, "input_len": input_len, "output_len": output_len, "percentiles": PERCENTILES}
        json_file.write_text(json.dumps(record | {"levels": [asdict(level) for level in levels]}, indent=1) + "\n")
    if png:
        _plot(levels, png)
    if any(level.errors for level in levels):
        raise typer.Exit(1)


async def _run_level(
    url: str, model: str, prompts: np.ndarray, output_len: int, concurrency: int
) -> tuple[list[Trace], float]:
    """Keeps ``concurrency`` requests in flight until every prompt [requests, tokens] was answered."""
    try:
        import tritonclient.grpc.aio as grpcclient
    except ImportError as error:
        raise MstarError(f"bench serve needs tritonclient (pip install 'mstar-triton[client]'): {error}") from error
    queue = iter(prompts)
    traces: list[Trace] = []

    async with grpcclient.InferenceServerClient(url) as client:

        async def worker() -> None:
            for prompt in queue:  # shared by all workers: each takes the next
                trace = await _stream_one(client, grpcclient, model, prompt, output_len)
                traces.append(trace)

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return traces, time.perf_counter() - start


async def _stream_one(client: Any, grpcclient: Any, model: str, prompt: np.ndarray, output_len: int) -> Trace:
    values: list[tuple[str, np.ndarray, str]] = [
        ("input_ids", prompt, "INT32"),
        ("stream", np.array([True]), "BOOL"),
        ("max_tokens", np.array([output_len], np.int32), "INT32"),
        ("temperature", np.array([0], np.float32), "FP32"),
        ("ignore_eos", np.array([True]), "BOOL"),
    ]
    inputs = []
    for name, array, datatype in values:
        tensor = grpcclient.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)

    async def one_request() -> Any:
        yield {"model_name": model, "inputs": inputs, "enable_empty_final_response": True}

    trace = Trace(time.perf_counter())
    async for result, error in client.stream_infer(one_request()):
        now = time.perf_counter()
        if error is not None:
            trace.error = str(error)
            break
        count = result.as_numpy("num_output_tokens")
        if count is not None and count.size and count[0] > 0:
            trace.arrivals.append(now)
            trace.tokens.append(int(count[0]))
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    trace.finished = time.perf_counter()
    return trace


def summarise(concurrency: int, traces: list[Trace], seconds: float) -> Level:
    """Percentiles over the requests that succeeded.

    The inter-token time of a request is (last - first arrival) / (tokens - tokens of the first response), so that
    responses which carry several tokens count each of them.
    """
    good = [trace for trace in traces if trace.error is None and trace.arrivals]
    tokens = sum(sum(trace.tokens) for trace in good)
    responses = sum(len(trace.arrivals) for trace in good)
    gaps = [
        (trace.arrivals[-1] - trace.arrivals[0]) / (sum(trace.tokens) - trace.tokens[0])
        for trace in good
        if len(trace.arrivals) > 1
    ]
    return Level(
        concurrency=concurrency,
        requests=len(traces),
        errors=len(traces) - len(good),
        seconds=seconds,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=tokens / seconds,
        ttft_ms=_percentiles([trace.arrivals[0] - trace.sent for trace in good]),
        itl_ms=_percentiles(gaps),
        e2e_ms=_percentiles([trace.finished - trace.sent for trace in good]),
        tokens_per_response=tokens / responses if responses else 0.0,
    )


def _percentiles(seconds: list[float]) -> tuple[float, ...]:
    if not seconds:
        return tuple(float("nan") for _ in PERCENTILES)
    return tuple(float(value) * 1e3 for value in np.percentile(seconds, PERCENTILES))


def _print(levels: list[Level], input_len: int, output_len: int) -> None:
    names = "/".join(f"p{p}" for p in PERCENTILES)
    table = Table(title=f"{input_len} tokens in, {output_len} out, greedy; times in ms as {names}")
    for heading in (
        "in flight",
        "requests",
        "errors",
        "req/s",
        "tok/s",
        "TTFT",
        "inter-token",
        "end to end",
        "tok/resp",
    ):
        table.add_column(heading, justify="right")
    for level in levels:
        table.add_row(
            str(level.concurrency),
            str(level.requests),
            str(level.errors),
            f"{level.requests_per_s:.2f}",
            f"{level.output_tokens_per_s:.1f}",
            *("/".join(f"{v:.0f}" for v in values) for values in (level.ttft_ms, level.itl_ms, level.e2e_ms)),
            f"{level.tokens_per_response:.2f}",
        )
    Console().print(table)


def _plot(levels: list[Level], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MstarError(f"--png needs matplotlib (pip install 'mstar-triton[plot]'): {error}") from error
    x = [level.concurrency for level in levels]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    left.plot(x, [level.output_tokens_per_s for level in levels], marker="o")
    left.set(title="throughput", ylabel="output tokens/s")
    for axis, title, pick in ((middle, "time to first token", "ttft_ms"), (right, "inter-token time", "itl_ms")):
        for index, percentile in enumerate(PERCENTILES):
            axis.plot(x, [getattr(level, pick)[index] for level in levels], marker="o", label=f"p{percentile}")
        axis.set(title=title, ylabel="ms", ylim=(0, None))
        axis.legend()
    for axis in (left, middle, right):
        axis.set(xlabel="requests in flight", xscale="log", xticks=x, xticklabels=[str(v) for v in x])
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
