"""Which prompt tokens a step tells of, and where its hidden states for them lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mstar.engine.resources.ragged import indptr, ragged_arange
from mstar.engine.resources.step import StepContext


@dataclass(frozen=True, eq=False)
class PromptStep:
    """The positions of a step that predict a prompt token, request behind request.

    ``lengths[i]`` of them belong to ``request_ids[i]``.  ``at`` int64 [n]: where in the step's tokens they lie;
    ``targets`` int64 [n]: the prompt tokens that they predict; ``num_top`` int64 [n].
    """

    request_ids: tuple[int, ...]
    lengths: list[int]
    at: np.ndarray
    targets: np.ndarray
    num_top: np.ndarray


class Prompts:
    """Prompts that are asked about, and how far each has run, by master row."""

    def __init__(self, total_rows: int) -> None:
        self._ids: dict[int, np.ndarray] = {}  # by master row
        self._num_top = np.zeros(total_rows, np.int64)
        self._last = np.zeros(total_rows, np.int64)  # the position that predicts nothing of the prompt; 0: not asked
        self._position = np.zeros(total_rows, np.int64)

    def put(self, row: int, ids: np.ndarray, num_top: int) -> None:
        self._ids[row] = ids
        self._num_top[row] = num_top
        self._last[row] = max(ids.size - 1, 0)

    def drop(self, row: int) -> None:
        if self._ids.pop(row, None) is not None:
            self._last[row] = 0

    def start(self, row: int, position: int) -> None:
        """The row's next token is that of ``position``."""
        self._position[row] = position

    def of_step(self, ctx: StepContext) -> PromptStep | None:
        """What the step tells; None where that is nothing."""
        if not self._ids:
            return None
        rows, spans = ctx.rows[: ctx.num_real], ctx.spans[: ctx.num_real]
        starts = self._position[rows]
        lengths = np.minimum(starts + spans, self._last[rows]) - starts
        asking = np.flatnonzero(lengths > 0)
        if not asking.size:
            return None
        lengths, rows, starts = lengths[asking], rows[asking], starts[asking]
        firsts = indptr(spans)[asking]
        targets = [
            self._ids[row][start + 1 : start + 1 + length]
            for row, start, length in zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        ]
        return PromptStep(
            request_ids=tuple(ctx.request_ids[i] for i in asking.tolist()),
            lengths=lengths.tolist(),
            at=firsts.repeat(lengths) + ragged_arange(lengths),
            targets=np.concatenate(targets),
            num_top=self._num_top[rows].repeat(lengths),
        )

    def advance(self, ctx: StepContext) -> None:
        if self._ids:
            self._position[ctx.rows[: ctx.num_real]] += ctx.spans[: ctx.num_real]
