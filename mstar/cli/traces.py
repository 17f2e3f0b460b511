"""What commands that play traces have in common: the trace, the bounds, and the runs to compare."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mstar.cli.assignments import parse_assignments
from mstar.cli.errors import InputError
from mstar.runtime.options import EngineOptions, parse_options
from mstar.simulate.synthetic import SYNTHETIC, Ask, with_tenants
from mstar.simulate.trace import Trace, read_trace

TraceName = Annotated[str, typer.Option("--trace", help=f"{', '.join(SYNTHETIC)}, or a .jsonl file")]
Requests = Annotated[int, typer.Option(min=1, help="of a made-up trace")]
PromptTokens = Annotated[int, typer.Option(min=1, help="mean length; of a chat, what a turn adds")]
OutputTokens = Annotated[int, typer.Option(min=1, help="mean length of answers")]
Tenants = Annotated[int, typer.Option(min=1, help="deal a made-up trace out to so many, unequally")]
Systems = Annotated[int, typer.Option(min=1, help="different system prompts of the trace systems")]
SystemTokens = Annotated[int, typer.Option(min=1, help="their mean length, which comes before that of prompts")]
SystemSkew = Annotated[
    float, typer.Option(min=0.0, max=10.0, help="how unequally they are asked for: 0 alike, 1 as by Zipf")
]
Together = Annotated[int, typer.Option(min=1, help="requests that come at once with one system prompt")]
Seed = Annotated[int, typer.Option(min=0, help="of a made-up trace")]
SloTtft = Annotated[float, typer.Option(min=0.0, help="a request in time has its first token by then")]
SloItl = Annotated[float, typer.Option(min=0.0, help="and 99% of the gaps between tokens within this")]
Options = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE of an engine option, as in config.pbtxt (max_batch_tokens=512); repeat for several."),
]
Versus = Annotated[
    list[str] | None,
    typer.Option(help="run once more with these options (NAME=VALUE, several by comma); repeat for several runs"),
]


def runs_of(model: str, option: list[str], versus: list[str]) -> dict[str, EngineOptions]:
    """Options of each run, by its name: those given, then these with each of ``versus`` over them.

    Raises:
        InputError, LoadError: some are wrong, of any run.
    """
    given = parse_assignments(option)
    runs = {", ".join(option) or "defaults": given}
    for each in versus:
        runs[each] = given | parse_assignments(re.split(r",(?=\w+=)", each), "--versus")
    return {name: parse_options({"model": model} | options)[0] for name, options in runs.items()}


def trace_maker(name: str, tenants: int) -> Callable[[Ask], Trace]:
    """What makes a trace as asked for; that of a file is the same whatever is asked.

    Raises:
        InputError: no such kind.
        LoadError: the file is none.
    """
    if name.endswith(".jsonl"):
        read = read_trace(Path(name))
        return lambda ask: read
    if name not in SYNTHETIC:
        raise InputError(f"--trace: {', '.join(SYNTHETIC)} or a .jsonl file, got {name!r}")
    make = SYNTHETIC[name]
    return lambda ask: with_tenants(make(ask), tenants, ask.seed) if tenants > 1 else make(ask)
