"""What a request's parameters must be for a model's resources to take them: errors name the client's field."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mstar.conductor.request import MAX_LOGPROBS, EngineRequest, LogitEdits
from mstar.engine.resources.sampler.config import SamplerSpec, SamplingReqConfig
from mstar.utils.errors import InvalidArgument, MstarError

MAX_PENALTY = 2.0  # of presence and frequency, either way
MAX_STOP_IDS = 1024  # of one request: every row has room for as many as the one with most
# Of the request's sampling fields, the value that is off.
_SAMPLING_OFF = {
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "repetition_window": 0,
    "min_tokens": 0,
    "top_p_first": False,
    "top_p_min_keep": 1,
}
_EDITS = {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "bias": "logit_bias",
    "bad_words": "bad_words",
    "allowed_ids": "allowed_token_ids",
}


class RefusedParameter(InvalidArgument):
    """What a resource says of a parameter in its own words, ``<field> must be <allowed>, got <value>``."""

    def __init__(self, error: ValueError) -> None:
        field, _, rest = str(error).partition(" ")
        self.field = field.rstrip(":")
        MstarError.__init__(self, f"{self.field}: {rest}")


def unsupported(field: str, off: str, got: object) -> InvalidArgument:
    """The error for a feature that no resource of the model honours."""
    return InvalidArgument(field, f"must be {off}, for this model has nothing that honours it", got)


def check_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> None:
    """InvalidArgument for an id outside the vocabulary, or too many."""
    if len(stop_ids) > MAX_STOP_IDS:
        raise InvalidArgument("stop_token_ids", f"must be at most {MAX_STOP_IDS} ids", f"{len(stop_ids)} ids")
    if stop_ids:
        _check_ids("stop_token_ids", stop_ids, vocab_size)


def check_sampling(config: SamplingReqConfig, spec: SamplerSpec) -> None:
    """InvalidArgument for what the sampler refuses."""
    try:
        config.validate(spec)
    except ValueError as error:
        raise RefusedParameter(error) from None


def check_unsampled(request: EngineRequest) -> None:
    """InvalidArgument for sampling that is asked of a model without a sampler."""
    for field, off in _SAMPLING_OFF.items():
        if getattr(request, field) != off:
            raise unsupported(field, str(off).lower(), getattr(request, field))


def check_unedited(edits: LogitEdits, min_tokens: int) -> None:
    """InvalidArgument for edits that are asked of a model without a resource for them."""
    for name, field in _EDITS.items():
        if getattr(edits, name):
            raise unsupported(field, "unset", getattr(edits, name))
    if min_tokens:
        raise unsupported("min_tokens", "0 beside stop_token_ids", min_tokens)


def checked_edits(edits: LogitEdits, vocab_size: int) -> np.ndarray:
    """The allowed ids, int64; empty for all.

    Raises:
        InvalidArgument: a penalty or bias is out of range, an id outside the vocabulary, or a sequence empty.
    """
    for field in ("presence_penalty", "frequency_penalty"):
        value = getattr(edits, field)
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            raise InvalidArgument(field, f"must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]", value)
    if edits.bias:
        _check_ids("logit_bias", [token_id for token_id, _ in edits.bias], vocab_size)
        for _, value in edits.bias:
            if not math.isfinite(value):
                raise InvalidArgument("logit_bias", "values must be finite", value)
    for word in edits.bad_words:
        if not word:
            raise InvalidArgument("bad_words", "each must have at least one token", word)
        _check_ids("bad_words", word, vocab_size)
    if len(edits.allowed_ids) % 4:
        raise InvalidArgument("allowed_token_ids", "must be whole int32 ids", f"{len(edits.allowed_ids)} bytes")
    allowed = np.frombuffer(edits.allowed_ids, "<i4").astype(np.int64)
    if allowed.size:
        _check_ids("allowed_token_ids", allowed, vocab_size)
    return allowed


def check_logprobs(request: EngineRequest, limit: int, max_tops: Sequence[int]) -> None:
    """``max_tops``: most tokens that each resource for log-probabilities tells of.

    Raises:
        InvalidArgument: more are asked for, the model has no such resource, or a prompt's are asked for of a request
            that runs no step.
    """
    most = min(max_tops, default=MAX_LOGPROBS)
    for field, count in (("logprobs", request.num_logprobs), ("prompt_logprobs", request.num_prompt_logprobs)):
        if not -1 <= count <= min(most, MAX_LOGPROBS):
            raise InvalidArgument(field, f"must be in [0, {min(most, MAX_LOGPROBS)}]", count)
        if count >= 0 and not max_tops:
            raise unsupported(field, "unset", count)
    if request.num_prompt_logprobs >= 0 and limit == 0:
        raise InvalidArgument("max_tokens", "must be at least 1 with prompt_logprobs", 0)


def _check_ids(field: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> None:
    low, high = (int(ids.min()), int(ids.max())) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
    if low < 0 or high >= vocab_size:
        raise InvalidArgument(field, f"token ids must be in [0, {vocab_size})", low if low < 0 else high)
