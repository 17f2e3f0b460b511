"""How a command ends when an error meant for its user is raised: one line, no traceback, and an exit code."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from mstar.utils.errors import InvalidArgument, LoadError, MstarError, Unsupported

FAILED = 1  # the command was right, but could not be carried out
MISTAKEN = 2  # what was asked for is wrong or does not exist, as for an unknown option


class InputError(MstarError):
    """A request or a file given to a command is wrong; the message says where."""


class MstarGroup(TyperGroup):
    """A group of commands whose ``MstarError`` becomes one line on stderr."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MstarError as error:
            text = " ".join(str(error).splitlines())
            typer.echo(f"mstar: {text}", err=True)
            raise typer.Exit(exit_code(error)) from None


def exit_code(error: MstarError) -> int:
    """2 for what its user must change, 1 for what went wrong by itself."""
    return MISTAKEN if isinstance(error, InputError | InvalidArgument | LoadError | Unsupported) else FAILED
