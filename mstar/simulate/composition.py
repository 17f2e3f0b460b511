"""What a step consists of, as far as its time depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mstar.engine.batch import Batch
from mstar.model.text_llm import PREFILL

KINDS = ("decode", "prefill", "mixed")


class Composition(NamedTuple):
    """``decode_context`` counts the tokens that rows of one token attend to, themselves included.  ``prompt_pairs``
    counts pairs of a prompt's token in this step and one it attends to."""

    decode_rows: int
    decode_context: int
    prompt_rows: int
    prompt_tokens: int
    prompt_pairs: int

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        if not self.prompt_rows:
            return "decode"
        return "mixed" if self.decode_rows else "prefill"


class StepRows(NamedTuple):
    """A step row by row, in its order: ``spans`` new tokens behind ``stored`` ones, int64 [n]; of the last
    ``num_prompts`` rows they are tokens of the prompt."""

    spans: np.ndarray
    stored: np.ndarray
    num_prompts: int

    def compose(self) -> Composition:
        """The sums that a cost model looks at."""
        num_decode = self.spans.size - self.num_prompts
        context = int(self.stored[:num_decode].sum()) + num_decode
        if not self.num_prompts:
            return Composition(num_decode, context, 0, 0, 0)
        spans, stored = self.spans[num_decode:], self.stored[num_decode:]
        pairs = spans * stored + spans * (spans + 1) // 2
        return Composition(num_decode, context, self.num_prompts, int(spans.sum()), int(pairs.sum()))


def rows_of(batch: Batch, stored: np.ndarray) -> StepRows:
    """The rows of a batch of a text model, with ``stored`` int64 [n] tokens each in the cache before the step."""
    num_rows = len(batch.request_ids)
    if batch.row_walks is None:
        num_prompts = num_rows if batch.graph_walk == PREFILL else 0
    else:
        num_prompts = sum(walk == PREFILL for walk in batch.row_walks)
    spans = np.ones(num_rows, np.int64)
    for row in range(num_rows - num_prompts, num_rows):
        part = None if batch.prompt_parts is None else batch.prompt_parts[row]
        spans[row] = part[1] - part[0] if part is not None else _prompt_len(batch, row) - int(stored[row])
    return StepRows(spans, stored, num_prompts)


def _prompt_len(batch: Batch, row: int) -> int:
    prompt_ids = batch.infos[row].prompt_ids
    assert prompt_ids is not None, "a text model's request has a prompt"
    return len(prompt_ids)


def columns(compositions: Sequence[Composition]) -> Mapping[str, np.ndarray]:
    """The fields of many, int64 [n] each."""
    table = np.array(compositions, np.int64).reshape(-1, len(Composition._fields))
    return dict(zip(Composition._fields, table.T, strict=True))
