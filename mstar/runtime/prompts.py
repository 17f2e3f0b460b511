"""A prompt in any of its forms, as token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mstar.utils.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from mstar.model.front import ModelFront


def prompt_ids(front: ModelFront, text: str | None, input_ids: Any, messages: Any, context: int) -> np.ndarray:
    """Token ids int32 [n] of the one prompt that is given; 1 <= n < ``context``.

    Raises:
        InvalidArgument: names ``text_input``, ``input_ids`` or ``messages``, what is allowed, and what was given.
        Unsupported: ``messages`` for a model without a chat template.
    """
    field, ids = _encoded(front, text, input_ids, messages)
    if ids.size == 0:
        raise InvalidArgument(field, "a prompt of at least one token", "none")
    if ids.size >= context:
        raise InvalidArgument(
            field,
            f"at most {context - 1} tokens, one less than the context limit of {context}",
            int(ids.size),
        )
    return ids


def refuse_surrogates(field: str, text: str) -> None:
    """JSON can name half of a character (an unpaired ``\\ud800``), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, "valid UTF-8", text[error.start : error.end]) from None


def _encoded(front: ModelFront, text: str | None, input_ids: Any, messages: Any) -> tuple[str, np.ndarray]:
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
    refuse_surrogates(field, text)
    return text


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
            refuse_surrogates(f"messages[{index}].content", content)
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
