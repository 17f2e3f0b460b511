"""A request as Python code or a line of JSON gives it: which prompt, which parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from mstar.runtime.json_text import DuplicateKey, parse_json
from mstar.runtime.params import SamplingParams, coerce_parameters
from mstar.utils.errors import InvalidArgument

Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]] | Mapping[str, Any]
Params: TypeAlias = SamplingParams | Mapping[str, Any]

PROMPT_KEYS = {
    "text_input": "text",
    "prompt": "text",
    "input_ids": "input_ids",
    "prompt_ids": "input_ids",
    "messages": "messages",
}


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt of any form, or a list of prompts, as a list of prompts."""
    if isinstance(prompts, str | Mapping) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    each = list(prompts)
    is_ids = bool(each) and all(isinstance(item, int | np.integer) for item in each)
    is_chat = bool(each) and all(isinstance(item, Mapping) and "role" in item for item in each)
    return [each] if is_ids or is_chat else each


def split_request(prompt: Prompt) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prompt as ``prepare_request`` takes it, and the parameters that came with it, coerced.

    Raises:
        InvalidArgument: no prompt or several, or a parameter outside its contract.
    """
    if isinstance(prompt, str):
        return {"text": prompt}, {}
    if not isinstance(prompt, Mapping):
        is_chat = not isinstance(prompt, np.ndarray) and any(isinstance(item, Mapping) for item in prompt)
        return {"messages" if is_chat else "input_ids": prompt}, {}
    given = [key for key in prompt if key in PROMPT_KEYS and prompt[key] is not None]
    if len(given) != 1:
        raise InvalidArgument("prompt", "exactly one of text_input, input_ids, messages", given or "none of them")
    rest = {key: value for key, value in prompt.items() if key not in PROMPT_KEYS}
    nested = _object("sampling_parameters", rest.pop("sampling_parameters", None))
    return {PROMPT_KEYS[given[0]]: prompt[given[0]]}, coerce_parameters(nested) | coerce_parameters(rest)


def named_params(params: Params | None) -> dict[str, Any]:
    """Parameters by their own names, coerced."""
    if params is None:
        return {}
    if isinstance(params, SamplingParams):
        return msgspec.structs.asdict(params)
    return coerce_parameters(params)


def _object(field: str, value: Any) -> Mapping[str, Any]:
    """A mapping, or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except DuplicateKey as error:
            raise InvalidArgument(field, "each key once", error.key) from None
        except ValueError:
            raise InvalidArgument(field, "a JSON object", value) from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(field, "a JSON object", value)
    return value
