"""What requests asked to be told of their tokens' log-probabilities, as records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mstar.conductor.request import LOGPROB, MAX_LOGPROBS

_PLACES = np.arange(MAX_LOGPROBS)
# The step's names of what a record holds, by field.
_TOKEN = {"logprob": "logprob", "rank": "logprob_rank", "top_ids": "top_ids", "top_logprobs": "top_logprobs"}
_PROMPT = {
    "logprob": "prompt_logprob",
    "rank": "prompt_rank",
    "top_ids": "prompt_top_ids",
    "top_logprobs": "prompt_top_logprobs",
}


def of_tokens(host: Mapping[str, np.ndarray], places: np.ndarray, num_top: np.ndarray) -> np.ndarray:
    """Records LOGPROB [m] of the rows at ``places`` int64 [m] of a step's host arrays.

    ``num_top`` int64 [m]: how many of the most likely tokens each row asked for.
    """
    return _records({field: host[name][places] for field, name in _TOKEN.items()}, num_top[:, None])


def of_prompt(outputs: Mapping[str, list[Any]], num_top: int) -> np.ndarray:
    """Records LOGPROB [n] of what one step told of a prompt: lists of tensors, one after the other."""
    parts = {field: [part.cpu().numpy() for part in outputs.get(name, ())] for field, name in _PROMPT.items()}
    if not parts["logprob"]:
        return np.empty(0, LOGPROB)
    return _records({field: np.concatenate(each) for field, each in parts.items()}, num_top)


def _records(fields: Mapping[str, np.ndarray], num_top: np.ndarray | int) -> np.ndarray:
    records = np.empty(len(fields["logprob"]), LOGPROB)
    records["logprob"], records["rank"] = fields["logprob"], fields["rank"]
    hidden = (num_top <= _PLACES) | (fields["top_ids"] < 0)
    records["top_ids"] = np.where(hidden, -1, fields["top_ids"])
    records["top_logprobs"] = np.where(hidden, 0, fields["top_logprobs"])
    return records
