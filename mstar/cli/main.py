"""The ``mstar`` command: one file a subcommand, registered here."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from mstar import __version__
from mstar.cli import repository
from mstar.cli.errors import MstarGroup
from mstar.cli.generate import generate
from mstar.cli.lazy import LazyGroup
from mstar.cli.serve import CONTEXT_SETTINGS, serve
from mstar.runtime.launch import thread_waiting


class BenchGroup(LazyGroup):
    """The commands under ``mstar bench``."""

    targets = {name: f"mstar.cli.bench.{name}:{name}" for name in ("host", "offline", "sampler", "serve", "trace")}


class KernelsGroup(LazyGroup):
    """The commands under ``mstar kernels``."""

    targets = {"build": "mstar.cli.kernels:build", "list": "mstar.cli.kernels:list_kernels"}


class SimulateGroup(LazyGroup):
    """The commands under ``mstar simulate``; without a name it is ``run``."""

    targets = {"run": "mstar.cli.simulate:run", "fit": "mstar.cli.simulate:fit"}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.targets, "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=MstarGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(cls=BenchGroup, no_args_is_help=True, help="Measure what the engine or a running server delivers.")


kernels = typer.Typer(cls=KernelsGroup, no_args_is_help=True, help="Compile GPU kernels ahead, and list them.")
simulation = typer.Typer(cls=SimulateGroup, help="Play a trace through the real conductor in virtual time.")


@bench.callback()
def measure() -> None:
    """Measure what the engine or a running server delivers."""


@kernels.callback()
def compile_ahead() -> None:
    """Compile GPU kernels ahead, and list them."""


@simulation.callback()
def play() -> None:
    """Play a trace through the real conductor in virtual time: run (the default), or fit steps for it."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mstar {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Language models behind NVIDIA Triton Inference Server, streaming token by token."""
    os.environ.update(thread_waiting())  # before a command loads torch


app.command("serve", context_settings=CONTEXT_SETTINGS)(serve)
app.command("generate")(generate)
app.add_typer(bench, name="bench")
app.add_typer(kernels, name="kernels")
app.add_typer(simulation, name="simulate")
app.add_typer(repository.app, name="repository")
