"""Commands that are imported when they are used: those that need torch must not slow down the others."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup


class LazyGroup(TyperGroup):
    """A group of commands by name; a target is ``module:function``."""

    targets: Mapping[str, str] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.targets)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        target = self.targets.get(cmd_name)
        if target is None:
            return None
        module, _, function = target.partition(":")
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(cmd_name)(getattr(import_module(module), function))
        return typer.main.get_command(single)
