"""``mstar repository``: keep the model repository's files in step with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from mstar.cli.assignments import parse_assignments
from mstar.cli.errors import FAILED, InputError
from mstar.serving.pbtxt import render_config

app = typer.Typer(no_args_is_help=True, help="Keep the files of a model repository in step with this version.")

CONFIG = "config.pbtxt"
_BLOCKS = ("input", "output")


@app.callback()
def repository() -> None:
    """Keep the files of a model repository in step with this version."""


@app.command()
def render(
    entry: Annotated[
        Path | None, typer.Argument(help="Folder of a model, or its config.pbtxt. Default: print a new one.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of a new config's parameters; repeat for several.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Update the file instead of printing it.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only say whether it is up to date; exit 1 if not.")] = False,
) -> None:
    """Print config.pbtxt with the input and output tensors that this version serves.

    Of an existing file only the tensors change; parameters and all else stay as they are.
    """
    if entry is None:
        if write or check:
            raise InputError("--write and --check need the folder of a model")
        typer.echo(render_config(parse_assignments(option or ["model=smollm2-135m"])), nl=False)
        return
    if option:
        raise InputError("--option is for a new config.pbtxt: edit the parameters of an existing one in the file")
    file = entry / CONFIG if entry.is_dir() else entry
    old = _read(file)
    new = update_tensors(old, file)
    if check:
        typer.echo(f"{file}: {'up to date' if new == old else 'not up to date (mstar repository render --write)'}")
        raise typer.Exit(0 if new == old else FAILED)
    if not write:
        typer.echo(new, nl=False)
    elif new != old:
        file.write_text(new, encoding="utf-8")


def update_tensors(text: str, file: Path) -> str:
    """``text`` of a config.pbtxt with its input and output blocks as this version has them.

    Raises:
        InputError: a block is missing, or doesn't start with ``input [`` and end with ``]`` on lines of their own.
    """
    fresh = render_config({"model": "any"})
    for name in _BLOCKS:
        block = re.compile(rf"^{name} \[\n.*?^\]$", re.MULTILINE | re.DOTALL)
        found = block.search(fresh)
        assert found is not None
        text, count = block.subn(found[0].replace("\\", r"\\"), text)
        if count != 1:
            raise InputError(f"{file}: one block '{name} [' ... ']' on lines of its own is needed, got {count}")
    return text


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
