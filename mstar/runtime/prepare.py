"""From a prompt and its parameters to a request the engine can run: every check that concerns the request alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mstar.runtime.messages import EngineRequest
from mstar.runtime.options import FrontOptions
from mstar.runtime.params import GREEDY_BELOW, SMALLEST_TOP_P, SamplingParams
from mstar.utils.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from mstar.model.front import ModelFront

FALLBACK_TEMPERATURE = 0.6  # the sampler config's own default


def prepare_request(
    front: ModelFront,
    *,
    text: str | None = None,
    input_ids: Any = None,
    messages: Sequence[Mapping[str, Any]] | str | None = None,
    params: SamplingParams,
    front_options: FrontOptions,
    context_length: int | None = None,
) -> EngineRequest:
    """Tokenises the one prompt that is given, checks it, and fills in every default.

    Args:
        text: a prompt; special tokens in it are recognised.
        input_ids: a prompt as token ids, any 1-D array or sequence of integers.
        messages: a chat, as a list of objects or its JSON; rendered by the model's template.
        context_length: the engine's limit where it is lower than the model's.

    Raises:
        InvalidArgument: names ``text_input``, ``input_ids`` or ``messages``, what is allowed, and what was given.
        Unsupported: ``messages`` for a model without a chat template.
    """
    context = front.context_length if context_length is None else min(context_length, front.context_length)
    field, ids = _prompt(front, text, input_ids, messages)
    if ids.size == 0:
        raise InvalidArgument(field, "a prompt of at least one token", "none")
    if ids.size >= context:
        raise InvalidArgument(
            field,
            f"at most {context - 1} tokens, one less than the context limit of {context}",
            int(ids.size),
        )
    limit = params.max_tokens if params.max_tokens is not None else front_options.default_max_tokens
    return EngineRequest(
        prompt_ids=ids.astype("<i4", copy=False).tobytes(),
        max_tokens=None if limit is None else min(limit, context - int(ids.size)),
        temperature=_temperature(front, params, front_options),
        top_k=_top_k(params.top_k if params.top_k is not None else front_options.default_top_k, front.vocab_size),
        top_p=max(params.top_p if params.top_p is not None else front_options.default_top_p, SMALLEST_TOP_P),
        seed=params.seed,
        ignore_eos=params.ignore_eos,
    )


def _prompt(front: ModelFront, text: str | None, input_ids: Any, messages: Any) -> tuple[str, np.ndarray]:
    given = [
        name
        for name, value in (("text_input", text), ("input_ids", input_ids), ("messages", messages))
        if value is not None
    ]
    if len(given) != 1:
        raise InvalidArgument("prompt", "exactly one of text_input, input_ids, messages", given or "none of them")
    if text is not None:
        return "text_input", front.encode(_checked_text("text_input", text))
    if messages is not None:
        chat = _chat(messages)
        if front.chat is None:
            raise Unsupported("messages", "a model with a chat template", front.name)
        return "messages", front.encode_chat(chat)
    return "input_ids", _ids(input_ids, front.vocab_size)


def _checked_text(field: str, text: Any) -> str:
    if not isinstance(text, str):
        raise InvalidArgument(field, "a string", text)
    if not text:
        raise InvalidArgument(field, "a prompt of at least one token", text)
    _refuse_surrogates(field, text)
    return text


def _refuse_surrogates(field: str, text: str) -> None:
    """JSON can name half of a character (an unpaired ``\\ud800``), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, "valid UTF-8", text[error.start : error.end]) from None


def _chat(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, json.JSONDecodeError) else "broken JSON"
            raise InvalidArgument("messages", "a JSON list of objects", reason) from None
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidArgument("messages", "a list of objects with role and content", messages)
    if not messages:
        raise InvalidArgument("messages", "at least one message", "none")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgument(f"messages[{index}]", "an object with role and content", message)
        content = message.get("content")
        if isinstance(content, str):
            _refuse_surrogates(f"messages[{index}].content", content)
    return [dict(message) for message in messages]


def _ids(values: Any, vocab_size: int) -> np.ndarray:
    allowed = f"token ids in [0, {vocab_size})"
    if isinstance(values, str | bytes) or (
        isinstance(values, Sequence) and any(isinstance(value, bool | np.bool_) for value in values)
    ):
        raise InvalidArgument("input_ids", allowed, values)
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # ragged lists
        raise InvalidArgument("input_ids", allowed, values) from None
    if array.ndim != 1:
        raise InvalidArgument("input_ids", f"one list of {allowed}", f"shape {list(array.shape)}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidArgument("input_ids", allowed, values)
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        raise InvalidArgument("input_ids", allowed, int(array[outside][0]))
    return array.astype(np.int32)


def _temperature(front: ModelFront, params: SamplingParams, options: FrontOptions) -> float:
    for value in (params.temperature, options.default_temperature, front.generation.get("temperature")):
        if isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < math.inf:
            return 0.0 if value < GREEDY_BELOW else float(value)
    return FALLBACK_TEMPERATURE


def _top_k(top_k: int, vocab_size: int) -> int:
    """0 where it would keep every token."""
    return 0 if top_k <= 0 or top_k >= vocab_size else top_k
