"""The content of responses: what one sequence brought, as the contract's output tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np

from mstar.serving.contract import OUTPUT_BY_NAME
from mstar.utils.errors import ErrorCode


class Chunk(msgspec.Struct, frozen=True):
    """What one response says of one sequence; None stands for an output that it does not have.

    ``finish_reason`` is set on a sequence's last chunk only.  ``logprobs`` and ``prompt_logprobs`` are JSON (see
    ``mstar.serving.logprobs``), ``log_probs`` one number per new token.
    """

    text: str
    token_ids: Sequence[int] | None
    num_input_tokens: int
    num_output_tokens: int
    finish_reason: str | None = None
    stop_reason: str | None = None
    cumulative_logprob: float | None = None
    logprobs: str | None = None
    log_probs: Sequence[float] | None = None
    prompt_logprobs: str | None = None
    sequence_index: int | None = None


# The chunk's field of every output: outputs with one element per sequence, and those with several.
ONE_EACH = {
    "text_output": "text",
    "finish_reason": "finish_reason",
    "stop_reason": "stop_reason",
    "cumulative_logprob": "cumulative_logprob",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "sequence_index": "sequence_index",
    "num_input_tokens": "num_input_tokens",
    "num_output_tokens": "num_output_tokens",
}
SEVERAL_EACH = {"output_ids": "token_ids", "output_log_probs": "log_probs"}
TOLD_ONCE = frozenset({"prompt_logprobs"})  # the sequences have the prompt in common


def tensors_of(chunks: Sequence[Chunk], wanted: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """One response's arrays by output name, leaving out those not in ``wanted`` (None: all).

    ``chunks``: of one sequence, or of each sequence of a request.  An output that no chunk has is absent; a text that
    only some have is empty for the others.
    """
    values = _values_of_one(chunks[0]) if len(chunks) == 1 else dict(_values_of_several(chunks))
    tensors = {}
    for name, items in values.items():
        if wanted is None or name in wanted:
            numpy_type = OUTPUT_BY_NAME[name].numpy_type
            if numpy_type is np.object_:
                items = [text.encode() for text in items]
            tensors[name] = np.array(items, dtype=numpy_type)
    return tensors


def _values_of_one(chunk: Chunk) -> dict[str, Sequence[Any]]:
    values: dict[str, Sequence[Any]] = {}
    for name, field in ONE_EACH.items():
        value = getattr(chunk, field)
        if value is not None:
            values[name] = (value,)
    for name, field in SEVERAL_EACH.items():
        value = getattr(chunk, field)
        if value is not None:
            values[name] = value
    return values


def _values_of_several(chunks: Sequence[Chunk]) -> Iterator[tuple[str, Sequence[Any]]]:
    for name, field in ONE_EACH.items():
        each = [getattr(chunk, field) for chunk in chunks]
        if name in TOLD_ONCE:
            each = [value for value in each if value is not None]
        if any(value is not None for value in each):
            yield name, ["" if value is None else value for value in each]
    for name, field in SEVERAL_EACH.items():
        if getattr(chunks[0], field) is not None:
            yield name, list(chain.from_iterable(getattr(chunk, field) for chunk in chunks))


class Reply(Protocol):
    """Where a request's responses go; after the last one (``final=True``, or ``fail``) nothing may follow."""

    def send(self, chunks: Sequence[Chunk], *, final: bool) -> None: ...

    def fail(self, code: ErrorCode, message: str) -> None: ...

    def is_cancelled(self) -> bool: ...
