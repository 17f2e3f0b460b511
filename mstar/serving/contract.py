"""The tensor contract: one table of inputs and outputs, from which parsing, checks and config.pbtxt are made.

Request parameters and the keys of ``sampling_parameters`` follow the same table: every input but
``sampling_parameters`` itself may come by any of the three ways (see ``mstar.serving.parse``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar.runtime.params import FIELDS

NUMPY_TYPES: dict[str, type[np.generic]] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the model.

    ``dims`` is ``(1,)`` for a scalar and ``(-1,)`` for a list. ``allowed``, ``default`` and ``unit`` are texts for
    people; the checks themselves live with the request options (``mstar.runtime.params`` and ``prepare``).
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    doc: str
    allowed: str = ""
    default: str = ""
    unit: str = ""

    @property
    def is_list(self) -> bool:
        return self.dims == (-1,)

    @property
    def numpy_type(self) -> type[np.generic]:
        return NUMPY_TYPES[self.dtype]

    def as_config(self, *, optional: bool) -> dict[str, Any]:
        """The tensor's entry in a Triton model configuration."""
        entry: dict[str, Any] = {"name": self.name, "data_type": f"TYPE_{self.dtype}", "dims": list(self.dims)}
        return {**entry, "optional": True} if optional else entry


SCALAR, LIST = (1,), (-1,)


def _option(name: str, dtype: str, dims: tuple[int, ...] = SCALAR, *, field: str | None = None) -> Tensor:
    """The tensor form of a request parameter, described by the parameter's own table."""
    row = FIELDS[field or name]
    default = "" if row.default in (None, ()) else str(row.default).lower()
    return Tensor(name, dtype, dims, row.doc, row.allowed, default, row.unit)


PROMPTS = (
    Tensor("text_input", "STRING", SCALAR, "Prompt text; special tokens in it are recognised.", "UTF-8, not empty"),
    Tensor("input_ids", "INT32", LIST, "Prompt as token ids.", "each 0 to vocabulary size - 1"),
    Tensor(
        "messages",
        "STRING",
        SCALAR,
        "Chat as JSON; the checkpoint's template makes the prompt.",
        'a list of {"role": ..., "content": ...}',
    ),
)

OPTIONS = (
    _option("stream", "BOOL"),
    _option("max_tokens", "INT32"),
    _option("min_tokens", "INT32"),
    _option("temperature", "FP32"),
    _option("top_k", "INT32"),
    _option("top_p", "FP32"),
    _option("min_p", "FP32"),
    _option("repetition_penalty", "FP32"),
    _option("presence_penalty", "FP32"),
    _option("frequency_penalty", "FP32"),
    _option("repetition_window", "INT32"),
    _option("penalize_prompt", "BOOL"),
    _option("top_p_first", "BOOL"),
    _option("top_p_min_keep", "INT32"),
    _option("seed", "UINT64"),
    _option("n", "INT32"),
    _option("ignore_eos", "BOOL"),
    _option("stop_words", "STRING", LIST, field="stop"),
    _option("stop_token_ids", "INT32", LIST),
    _option("include_stop_str_in_output", "BOOL"),
    _option("bad_words", "STRING", LIST),
    _option("logprobs", "INT32"),
    _option("prompt_logprobs", "INT32"),
    _option("guided_decoding_guide_type", "STRING"),
    _option("guided_decoding_guide", "STRING"),
    _option("timeout_ms", "INT32"),
    _option("request_priority", "INT32"),
    _option("tenant", "STRING"),
    _option("cache_salt", "STRING"),
    _option("no_cache", "BOOL"),
    _option("skip_special_tokens", "BOOL"),
    _option("spaces_between_special_tokens", "BOOL"),
    _option("return_token_ids", "BOOL"),
    _option("return_log_probs", "BOOL"),
    _option("return_cumulative_logprob", "BOOL"),
    _option("exclude_input_in_output", "BOOL"),
)
# Parameters without a tensor: lists of ids and maps, which come in sampling_parameters.
JSON_ONLY = ("logit_bias", "allowed_token_ids")

SAMPLING_PARAMETERS = Tensor(
    "sampling_parameters", "STRING", SCALAR, "Any of the inputs by name, in one JSON object.", "a JSON object"
)

INPUTS = (*PROMPTS, *OPTIONS, SAMPLING_PARAMETERS)

# One element per sequence: one, unless n > 1 and the request does not stream; then n, in the sequences' order.
OUTPUTS = (
    Tensor("text_output", "STRING", LIST, "New text when streaming (may be empty on the last), else all of it."),
    Tensor(
        "output_ids", "INT32", LIST, "New token ids; only with return_token_ids. Of n sequences, one after another."
    ),
    Tensor("finish_reason", "STRING", LIST, "stop, length or timeout; on a sequence's last response."),
    Tensor("stop_reason", "STRING", LIST, "The stop string or stop_token_ids entry that ended it, if one did."),
    Tensor("cumulative_logprob", "FP32", LIST, "Sum over all tokens so far; only with return_cumulative_logprob."),
    Tensor("logprobs", "STRING", LIST, "JSON list, one object per new token by token id; only with logprobs."),
    Tensor("output_log_probs", "FP32", LIST, "One per new token, laid out as output_ids; only with return_log_probs."),
    Tensor(
        "prompt_logprobs", "STRING", SCALAR, "JSON list for the prompt, first null; on the first response, if asked."
    ),
    Tensor("sequence_index", "INT32", LIST, "Which of the n sequences the response is of; only with n > 1."),
    Tensor("num_input_tokens", "UINT32", LIST, "Length of the prompt.", unit="tokens"),
    Tensor("num_output_tokens", "UINT32", LIST, "Tokens new in this response; the sum is the usage.", unit="tokens"),
)

INPUT_BY_NAME = {tensor.name: tensor for tensor in INPUTS}
OUTPUT_BY_NAME = {tensor.name: tensor for tensor in OUTPUTS}


def input_configs() -> list[dict[str, Any]]:
    """Every input as Triton's model configuration wants it; all optional: which prompt is there is our check."""
    return [tensor.as_config(optional=True) for tensor in INPUTS]


def output_configs() -> list[dict[str, Any]]:
    """Every output as Triton's model configuration wants it."""
    return [tensor.as_config(optional=False) for tensor in OUTPUTS]
