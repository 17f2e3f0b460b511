"""How long a GPU computes each step: CUDA events around what is launched for it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mstar.engine.phase_clock import PhaseClock

BEGINS = ("preprocess", "stage")  # phases at whose end a forward begins, where it is captured at the later one's
ENDS = "replay"


class ReplayEvents(PhaseClock):
    """A phase clock that records an event before and after each forward, on the current stream, while it is on."""

    def __init__(self, make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)) -> None:
        super().__init__()
        self.is_on = False
        self._make_event = make_event
        self._begun: Any = None
        self._steps: list[list[tuple[Any, Any]]] = []

    def mark(self, name: str) -> None:
        if not self.is_on:
            return
        if name in BEGINS:
            self._begun = self._record()
        elif name == ENDS and self._begun is not None:
            self._steps[-1].append((self._begun, self._record()))
            self._begun = None

    def begin_step(self) -> None:
        """What follows belongs to the next step."""
        if self.is_on:
            self._steps.append([])

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Waits for all events; forgets them.

        Returns:
            Milliseconds float64: of each step [n], that of its forwards together; and from the end of each to the
            start of the next [n - 1].
        """
        steps, self._steps = [forwards for forwards in self._steps if forwards], []
        if not steps:
            return np.empty(0), np.empty(0)
        steps[-1][-1][1].synchronize()
        taken = [sum(start.elapsed_time(end) for start, end in forwards) for forwards in steps]
        gaps = [before[-1][1].elapsed_time(after[0][0]) for before, after in pairwise(steps)]
        return np.array(taken), np.array(gaps)

    def _record(self) -> Any:
        event = self._make_event()
        event.record()
        return event
