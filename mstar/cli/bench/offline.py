"""``mstar bench offline``: the engine in this process, no server, against the floor and, on request, peers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from mstar.cli.assignments import parse_assignments
from mstar.cli.bench.offline_run import BATCH, WORKLOADS, OfflineSettings, run_offline
from mstar.cli.bench.peer import PEERS
from mstar.cli.bench.ranges import parse_counts
from mstar.cli.bench.workloads import Sampling
from mstar.cli.errors import InputError


def offline(
    model: Annotated[str, typer.Option(help="folder, .gguf file, Hugging Face id or alias")] = "smollm2-135m",
    batch_sizes: Annotated[str, typer.Option(help="comma-separated numbers of requests")] = "1,8,32",
    input_len: Annotated[int, typer.Option(min=1, help="prompt tokens per request")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="tokens generated per request; EOS is ignored")] = 64,
    workload: Annotated[
        str,
        typer.Option(help="batch, w3 (256 requests, prompts and outputs of 100 to 1,024 tokens), or both by comma"),
    ] = BATCH,
    ttft: Annotated[
        str | None, typer.Option(help="comma-separated prompt lengths: time one prompt alone to its first token")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="sample among the tokens that hold this share")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="sample among this many tokens; 0 is off")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    load_format: Annotated[
        str, typer.Option(help="dummy makes random weights: a folder with config.json is enough")
    ] = "auto",
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
    compare: Annotated[
        str | None, typer.Option(help="run another engine beside every run: transformers, vllm, or both by comma")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="on a GPU: write a trace of the largest batch's decode steps (.json.gz), print its kernels"),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
) -> None:
    """Measure generation: tok/s, ms per decode step, and how far that is from the floor of moving the bytes once.

    On a GPU also what a step is on the device: the replay, the gap between two, the kernels.
    """
    given = {
        "device": device,
        "dtype": dtype,
        "load_format": load_format,
        "num_threads": threads,
        "quantised_weights": quantised_weights,
    }
    settings = OfflineSettings(
        model=model,
        batch_sizes=tuple(parse_counts(batch_sizes, "--batch-sizes")),
        input_len=input_len,
        output_len=output_len,
        workloads=_choices(workload, "--workload", WORKLOADS),
        samplings=(Sampling(temperature, top_p, top_k),),
        first_token_lens=tuple(parse_counts(ttft, "--ttft")) if ttft else (),
        repeats=repeats,
        seed=seed,
        compare=_choices(compare, "--compare", PEERS) if compare else (),
        trace=profile,
        options=given | parse_assignments(option or []),
    )
    for file, flag in ((profile, "--profile"), (json_file, "--json")):
        if file and not file.parent.is_dir():
            raise InputError(f"{flag}: {file.parent} is no folder")
    record = run_offline(settings)
    print(record.text())
    if profile:
        print(record.kernels_text())
    if json_file:
        record.write(json_file)


def _choices(text: str, option: str, allowed: Collection[str]) -> tuple[str, ...]:
    """Names parted by commas.  A usage error naming ``option`` for any other than those ``allowed``."""
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(allowed):
        raise typer.BadParameter(f"of {', '.join(allowed)}, by comma; got {text!r}", param_hint=option)
    return names
