"""Reading lists of counts from the command line."""

from __future__ import annotations

import typer


def parse_counts(text: str, option: str) -> list[int]:
    """``"1,8,32"`` -> [1, 8, 32].  A usage error naming ``option`` for anything but integers >= 1."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"comma-separated integers >= 1, got {text!r}", param_hint=option)
    return counts
