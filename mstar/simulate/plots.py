"""Pictures of a simulation: latencies as shares of requests, and who waits and runs over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mstar.simulate.gaps import LEAST_NS, WIDTH
from mstar.simulate.measures import UNSEEN, Measures


def draw(pyplot: Any, runs: Mapping[str, Measures], file: Path) -> None:
    """Draws all ``runs`` over each other, by their names, into a file whose suffix says its format.

    Args:
        pyplot: the module ``matplotlib.pyplot``.
    """
    figure, (first, between, levels) = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for name, measures in runs.items():
        seen = measures.first_ns != UNSEEN
        waited = np.sort((measures.first_ns - measures.arrival_ns)[seen]) / 1e6
        first.plot(waited, np.arange(1, waited.size + 1) / max(waited.size, 1), label=name)
        counts = measures.gaps.counts
        used = np.flatnonzero(counts)
        edges_ms = LEAST_NS / 1e6 * np.exp(used * WIDTH)
        at_least = counts[used][::-1].cumsum()[::-1] / max(counts.sum(), 1)
        between.plot(edges_ms, at_least, label=name)
        points = measures.timeline.points()
        (line,) = levels.plot(points[:, 0] / 1e9, points[:, 1], label=name)
        levels.plot(points[:, 0] / 1e9, points[:, 2], ":", color=line.get_color(), alpha=0.6)
    _name(first, "first token, ms", "share of requests", xscale="log")
    _name(between, "between two tokens, ms", "share of gaps that are so long", xscale="log", yscale="log")
    _name(levels, "s", "requests that wait (dotted: run)")
    figure.legend(handles=first.get_lines(), loc="outside lower center")
    figure.savefig(file)
    pyplot.close(figure)


def _name(axes: Any, x: str, y: str, **scales: str) -> None:
    axes.set(xlabel=x, ylabel=y, **scales)
    axes.grid(visible=True, alpha=0.3)
    axes.minorticks_off()
