"""Reading lists of numbers from the command line."""

from __future__ import annotations

import math

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


def parse_numbers(text: str, option: str) -> list[float]:
    """``"0.5,2"`` -> [0.5, 2.0].  A usage error naming ``option`` for anything but finite numbers > 0."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise typer.BadParameter(f"comma-separated numbers > 0, got {text!r}", param_hint=option)
    return numbers
