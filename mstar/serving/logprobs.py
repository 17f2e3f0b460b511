"""Log-probabilities on their way from the engine's records to the outputs a request asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from mstar.conductor.request import LOGPROB
from mstar.runtime.logprobs import Logprob, positions
from mstar.text.tokenizer import Tokenizer

LOWEST = -9999.0  # what is less, such as the -inf of an impossible token, is told as this: JSON has no infinities


class TokenLogprobs:
    """What is told of one sequence's tokens: collects records, and gives the outputs of those not yet told.

    ``total`` is the sum over all tokens so far.
    """

    __slots__ = ("_held_ids", "_held_records", "_num_top", "_tokenizer", "_wants_each", "_wants_total", "total")

    def __init__(
        self, tokenizer: Tokenizer, *, num_top: int | None = None, each: bool = False, total: bool = False
    ) -> None:
        """``num_top``: most likely tokens beside each token in the JSON, None for no JSON.  ``each``: one number per
        token.  ``total``: their running sum."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._wants_each = each
        self._wants_total = total
        self._held_ids: list[int] = []
        self._held_records: list[np.ndarray] = []
        self.total = 0.0

    def add(self, ids: list[int], records: np.ndarray) -> None:
        """Tokens that count as output, with their LOGPROB records [len(ids)]."""
        self._held_ids.extend(ids)
        self._held_records.append(records)
        self.total += float(np.maximum(records["logprob"], LOWEST).sum(dtype=np.float64))

    def tell(self) -> dict[str, Any]:
        """The fields of a chunk for what was added since the last call."""
        ids, self._held_ids = self._held_ids, []
        records = np.concatenate([np.empty(0, LOGPROB), *self._held_records])
        self._held_records = []
        told: dict[str, Any] = {}
        if self._num_top is not None:
            told["logprobs"] = as_json(positions(records, ids, self._num_top, self._tokenizer))
        if self._wants_each:
            told["log_probs"] = np.maximum(records["logprob"], LOWEST).tolist()
        if self._wants_total:
            told["cumulative_logprob"] = self.total
        return told


def prompt_json(records: np.ndarray, prompt_ids: np.ndarray, num_top: int, tokenizer: Tokenizer) -> str:
    """JSON of a prompt's tokens: null for the first, which nothing comes before, then one object per token.

    ``records``: LOGPROB [prompt tokens - 1].
    """
    return as_json([None, *positions(records, prompt_ids[1:].tolist(), num_top, tokenizer)])


def as_json(told: Iterable[Mapping[int, Logprob] | None]) -> str:
    """``[{"<id>": {"logprob": …, "rank": …, "decoded_token": …}, …}, …]``."""
    return msgspec.json.encode([None if tokens is None else _objects(tokens) for tokens in told]).decode()


def _objects(tokens: Mapping[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {
            "logprob": max(about.logprob, LOWEST),
            "rank": about.rank,
            "decoded_token": about.decoded_token,
        }
        for token_id, about in tokens.items()
    }
