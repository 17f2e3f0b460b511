"""From a request's tensors and parameters to one set of values: what was asked, not yet whether it is allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar.runtime.json_text import DuplicateKey, parse_json
from mstar.runtime.params import ResponseParams, SamplingParams, coerce_parameters, split_parameters
from mstar.runtime.spellings import is_known
from mstar.serving import contract
from mstar.utils.errors import InvalidArgument

# Keys that Triton's own front ends leave among a request's parameters.
SERVER_KEYS = frozenset({"id", "headers", "binary_data_output"})
# Triton's own settings of a request.  Over gRPC it takes them out; what comes here, from HTTP, has no effect in it.
SERVER_SETTINGS = {
    "priority": "not taken, request_priority is a request's priority, where higher is sooner",
    "timeout": "not taken, timeout_ms is a request's time, in ms",
}
# Headers a server forwards (--http-header-forward-pattern) and that have no dash to be told by.
HEADER_KEYS = frozenset({
    "accept", "authorization", "b3", "baggage", "connection", "cookie", "date", "expect", "forwarded", "from", "host",
    "origin", "pragma", "range", "referer", "te", "traceparent", "tracestate", "trailer", "upgrade", "via", "warning",
})  # fmt: skip
PROMPT_NAMES = frozenset(prompt.name for prompt in contract.PROMPTS)


@dataclass(frozen=True)
class RawRequest:
    """A request as it reached the model: tensors copied out of shared memory, parameters as Triton's JSON text."""

    tensors: Mapping[str, np.ndarray]
    parameters: str = "{}"
    request_id: str = ""


@dataclass(frozen=True)
class ParsedRequest:
    """One request's values; at most one of the prompts is meant to be there: ``prepare_request`` checks them."""

    text: Any
    input_ids: Any
    messages: Any
    params: SamplingParams
    response: ResponseParams

    @property
    def include_prompt(self) -> bool:
        """Whether the answer begins with the prompt."""
        return self.response.exclude_input_in_output is False


def parse(raw: RawRequest) -> ParsedRequest:
    """Merge the three sources (typed tensor, then ``sampling_parameters``, then request parameter) and read them.

    Raises InvalidArgument, by the field's name, for a value that is not of the field's form or an unknown name.
    """
    values = _merge(raw)
    text, input_ids, messages = (values.pop(prompt.name, None) for prompt in contract.PROMPTS)
    params, response = split_parameters(values)
    asked = ParsedRequest(text, input_ids, messages, params, response)
    if response.stream and asked.include_prompt:
        raise InvalidArgument("exclude_input_in_output", "true or absent when stream is true", False)
    return asked


def _merge(raw: RawRequest) -> dict[str, Any]:
    """Checked values by canonical name, each from the source that goes first; prompts as they came."""
    tensors = {name: tensor_value(name, array) for name, array in raw.tensors.items()}
    parameters = _request_parameters(raw.parameters)
    name = contract.SAMPLING_PARAMETERS.name
    text, other = tensors.pop(name, None), parameters.pop(name, None)
    text = other if text is None else text
    options = {} if text is None else _options(name, text)
    merged: dict[str, Any] = {}
    for source in (parameters, options, tensors):
        for prompt in contract.PROMPTS:
            if source.get(prompt.name) is not None:
                merged[prompt.name] = source[prompt.name]
        merged |= coerce_parameters({key: value for key, value in source.items() if key not in PROMPT_NAMES})
    return merged


def tensor_value(name: str, array: np.ndarray) -> Any:
    """The Python value of an input tensor: a scalar for dims [1], a list for strings, an array for ids.

    Raises InvalidArgument for another dtype, another number of elements, or bytes that are not UTF-8.
    """
    tensor = contract.INPUT_BY_NAME.get(name)
    if tensor is None:
        raise InvalidArgument(name, "an input of this model", name)
    if array.dtype != tensor.numpy_type:
        raise InvalidArgument(name, f"dtype {tensor.dtype}", str(array.dtype))
    shape = list(array.shape)
    if tensor.is_list:
        if array.ndim != 1:
            raise InvalidArgument(name, "shape [n]", shape)
        return [decode_text(name, item) for item in array] if tensor.dtype == "STRING" else array
    if array.size != 1:
        raise InvalidArgument(name, "one element, shape [1]", f"shape {shape}")
    item = array.reshape(-1)[0]
    return decode_text(name, item) if tensor.dtype == "STRING" else item.item()


def decode_text(name: str, value: Any) -> str:
    """A STRING element as text; nothing is replaced silently."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(name, "valid UTF-8", value) from error


def _request_parameters(text: str) -> dict[str, Any]:
    """A request's own parameters, without what the server and its front ends put among them."""
    values = json.loads(text or "{}")
    for key, allowed in SERVER_SETTINGS.items():
        if key in values:
            raise InvalidArgument(key, allowed, values[key])
    return {key: value for key, value in values.items() if not _is_servers(key)}


def _is_servers(key: str) -> bool:
    if key in SERVER_KEYS or key.startswith("triton_") or key.lower() in HEADER_KEYS:
        return True
    # A dash marks a forwarded header, unless it is one of our names misspelt: that one must not be ignored.
    name = key.replace("-", "_")
    return "-" in key and name not in contract.INPUT_BY_NAME and not is_known(name)


def _options(name: str, text: Any) -> dict[str, Any]:
    """The object in ``sampling_parameters``. NaN and infinities pass here: their field refuses them by its name."""
    allowed = "a JSON object"
    if not isinstance(text, str):
        raise InvalidArgument(name, allowed, text)
    try:
        options = parse_json(text)
    except DuplicateKey as error:
        raise InvalidArgument(name, "each key once", error.key) from None
    except ValueError as error:
        raise InvalidArgument(name, allowed, text) from error
    if not isinstance(options, dict):
        raise InvalidArgument(name, allowed, text)
    if name in options:
        raise InvalidArgument(name, "not nested in itself", text)
    return options
