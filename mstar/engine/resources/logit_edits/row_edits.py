"""One request's changes to its logits, checked and laid out as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig
from mstar.utils.errors import shorten

_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class RowEdits:
    """Ids are int64, those of each field distinct.

    ``allowed``: the only ids that may be drawn; empty leaves all.  ``barred`` never are; ``stop_ids`` not before
    ``min_tokens`` were kept.  ``bias`` float32 belongs to ``bias_ids``.  ``word_last`` [words]: the last id of each bad
    word of several, barred where the newest tokens are the ids before it, of which there are ``word_lengths`` [words];
    ``word_before`` has them word behind word, those next to the last id first.
    """

    allowed: np.ndarray
    barred: np.ndarray
    min_tokens: int
    stop_ids: np.ndarray
    bias_ids: np.ndarray
    bias: np.ndarray
    word_last: np.ndarray
    word_lengths: np.ndarray
    word_before: np.ndarray
    presence: float
    frequency: float

    @classmethod
    def of(cls, config: LogitEditsReqConfig, vocab_size: int) -> RowEdits:
        """The edits of a request over ``vocab_size`` logits.

        Raises:
            ValueError: an id outside the vocabulary, or another value that cannot be honoured; names the field.
        """
        allowed = np.unique(_ids("allowed_token_ids", config.allowed_ids, vocab_size))
        barred, words = _NOBODY, config.bad_words
        if words:
            if not all(words):
                raise ValueError("bad_words must be sequences of at least one token id, got an empty one")
            _ids("bad_words", [token for word in words for token in word], vocab_size)
            barred = np.unique(np.array([word[0] for word in words if len(word) == 1], np.int64))
        if 2 * allowed.size > vocab_size:  # fewer ids to move the other way round
            barred = np.union1d(barred, np.setdiff1d(np.arange(vocab_size), allowed, assume_unique=True))
            allowed = _NOBODY
        several = sorted({tuple(word) for word in words if len(word) > 1})
        bias_ids = _ids("logit_bias", config.bias_ids, vocab_size)
        return cls(
            allowed=allowed,
            barred=barred,
            min_tokens=_min_tokens(config.min_tokens),
            stop_ids=np.unique(_ids("stop_token_ids", config.stop_ids, vocab_size)),
            bias_ids=bias_ids,
            bias=_bias(bias_ids, config.bias),
            word_last=np.array([word[-1] for word in several], np.int64),
            word_lengths=np.array([len(word) - 1 for word in several], np.int64),
            word_before=np.array([token for word in several for token in word[-2::-1]], np.int64),
            presence=_finite("presence_penalty", config.presence_penalty),
            frequency=_finite("frequency_penalty", config.frequency_penalty),
        )

    @property
    def history(self) -> int:
        """How many of the newest tokens these edits look at."""
        return int(self.word_lengths.max()) if self.word_lengths.size else 0

    @property
    def has_penalty(self) -> bool:
        return self.presence != 0 or self.frequency != 0

    @property
    def has_floor(self) -> bool:
        return self.min_tokens > 0 and self.stop_ids.size > 0

    @property
    def is_empty(self) -> bool:
        sizes = self.allowed.size + self.barred.size + self.bias_ids.size + self.word_last.size
        return not (sizes or self.has_penalty or self.has_floor)


def _ids(name: str, values: Any, vocab_size: int) -> np.ndarray:
    """``values`` as int64 [n]; ValueError for what is no id of the vocabulary."""
    ids = np.asarray(values)
    if ids.size == 0:
        return _NOBODY
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers in 0..{vocab_size - 1}, got {shorten(values)}")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"{name} must be token ids in 0..{vocab_size - 1}, got {int(wrong[0])}")
    return ids.astype(np.int64)


def _bias(ids: np.ndarray, values: Any) -> np.ndarray:
    bias = np.asarray(values, np.float32)
    if bias.shape != ids.shape:
        raise ValueError(f"logit_bias must have one value for each of {ids.size} ids, got {shorten(values)}")
    if np.unique(ids).size != ids.size:
        raise ValueError(f"logit_bias must name each token id once, got {shorten(ids.tolist())}")
    if not np.isfinite(bias).all():
        raise ValueError(f"logit_bias must have finite values, got {float(bias[~np.isfinite(bias)][0])}")
    return bias


def _finite(name: str, value: float) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {shorten(value)}")
    return float(value)


def _min_tokens(value: int) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"min_tokens must be an integer >= 0, got {shorten(value)}")
    return min(value, 2**62)
