"""What a step consists of, as far as its time depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mstar.engine.batch import Batch
from mstar.model.text_llm import PREFILL

KINDS = ("decode", "prefill", "mixed")


class StepSize(NamedTuple):
    """Rows of a step that bring one token each, rows that bring tokens of their prompts, and these tokens."""

    decode_rows: int
    prompt_rows: int
    prompt_tokens: int

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        return _kind(self.decode_rows, self.prompt_rows)


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
        return _kind(self.decode_rows, self.prompt_rows)


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
    num_rows, num_prompts = len(batch.request_ids), _num_prompts(batch)
    spans = np.ones(num_rows, np.int64)
    for row in range(num_rows - num_prompts, num_rows):
        spans[row] = _span(batch, row, int(stored[row]))
    return StepRows(spans, stored, num_prompts)


def size_of(batch: Batch) -> StepSize:
    """As :func:`rows_of`, without a look at what is stored: prompts that are not split begin behind what was cached."""
    num_rows, num_prompts = len(batch.request_ids), _num_prompts(batch)
    prompts = range(num_rows - num_prompts, num_rows)
    tokens = sum(_span(batch, row, batch.infos[row].cached_tokens) for row in prompts)
    return StepSize(num_rows - num_prompts, num_prompts, tokens)


def _num_prompts(batch: Batch) -> int:
    if batch.row_walks is None:
        return len(batch.request_ids) if batch.graph_walk == PREFILL else 0
    return batch.row_walks.count(PREFILL)


def _span(batch: Batch, row: int, begin: int) -> int:
    """Tokens of a row with a prompt, which begin at ``begin`` if it is not split."""
    part = None if batch.prompt_parts is None else batch.prompt_parts[row]
    return part[1] - part[0] if part is not None else _prompt_len(batch, row) - begin


def _kind(decode_rows: int, prompt_rows: int) -> str:
    if not prompt_rows:
        return "decode"
    return "mixed" if decode_rows else "prefill"


def _prompt_len(batch: Batch, row: int) -> int:
    prompt_ids = batch.infos[row].prompt_ids
    assert prompt_ids is not None, "a text model's request has a prompt"
    return len(prompt_ids)


def columns(compositions: Sequence[Composition]) -> Mapping[str, np.ndarray]:
    """The fields of many, int64 [n] each."""
    table = np.array(compositions, np.int64).reshape(-1, len(Composition._fields))
    return dict(zip(Composition._fields, table.T, strict=True))
