"""Parameters as users of vLLM, TensorRT-LLM, transformers and OpenAI clients spell them, where it is no mere alias."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mstar.runtime.fields import Field
from mstar.runtime.guides import GUIDE, TYPE, respell_guide
from mstar.runtime.param_table import BY_ANY_NAME, FIELDS
from mstar.utils.errors import InvalidArgument, Unsupported, shorten

SAMPLES = "do_sample"  # kept among coerced values until all sources are merged
OFF = object()  # in place of a value: the parameter is off, whatever another source says

# No effect on the text of any engine, or only on what this one has no use for (the id that pads batches).
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "pad_id", "pad_token_id",
    "use_cache",
})  # fmt: skip

GUIDES = (
    "guided_json", "guided_regex", "guided_grammar", "guided_choice", "guided_json_object", "guided_decoding",
    "structured_outputs", "response_format",
)  # fmt: skip

# Accepted at the values that change nothing: front ends of other dialects always send some of them.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "use_beam_search": (False,),
    "beam_search_diversity_rate": (0,),
    "early_stopping": (False,),
    "length_penalty": (0, 1),
    "best_of": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "diversity_penalty": (0,),
    "guidance_scale": (1,),
    "top_p_decay": (1,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "embedding_request": (False,),
}

# What cannot be honoured, and what to ask for instead.
UNSUPPORTED: Mapping[str, str] = {
    "end_id": "not taken; stop_token_ids and ignore_eos say where a text ends",
    "lora_name": "not taken; no adapters are served",
    "truncate_prompt_tokens": "not taken; cut the prompt before it is sent",
    "guided_decoding_backend": "not taken; there is one",
    "max_length": "not taken; max_tokens counts the generated tokens alone",
    "eos_token_id": "not taken; stop_token_ids and ignore_eos say where a text ends",
    "forced_bos_token_id": "not taken; put the token at the end of input_ids",
    "forced_eos_token_id": "not taken; a text that is cut ends with finish_reason length",
    "suppress_tokens": "not taken; logit_bias or allowed_token_ids bar tokens",
    "begin_suppress_tokens": "not taken; logit_bias or allowed_token_ids bar tokens",
    "sequence_bias": "not taken; logit_bias and bad_words are what there is",
    "bad_words_ids": "not taken; bad_words takes the words themselves",
    "bad_words_list": "not taken; bad_words takes the words themselves",
    "stop_words_list": "not taken; stop_words takes the strings themselves",
    "force_words_ids": "not taken; a guide says what must be in the text",
    "logits_processor": "not taken; no code of a client's runs in the engine",
    "logits_processors": "not taken; no code of a client's runs in the engine",
    "stopping_criteria": "not taken; stop, stop_token_ids and max_tokens say where a text ends",
    "priority": "not taken; request_priority is what there is, where higher is sooner",
    "guided_whitespace_pattern": "not taken; guided_regex or guided_grammar say where spaces may be",
}


def respell(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name as given, our name, value or :data:`OFF`) of every parameter that says something.

    Raises:
        InvalidArgument: an unknown name, or a value that has no meaning there.
        Unsupported: what this engine cannot honour.
    """
    for key, value in given.items():
        if not isinstance(key, str):
            raise unknown_parameter(key)
        special = _SPECIAL.get(key)
        if special is not None:
            if value is not None:
                yield from special(key, value, given)
        elif key in BY_ANY_NAME:
            if value is not None:
                yield key, BY_ANY_NAME[key].name, value
        elif key not in IGNORED:
            raise unknown_parameter(key)


def is_known(name: str) -> bool:
    """Whether some engine has a parameter of this name that is read, refused or passed over here."""
    return name in BY_ANY_NAME or name in _SPECIAL or name in IGNORED


def unknown_parameter(key: Any) -> InvalidArgument:
    """The error for a name no table has; it suggests the nearest known one."""
    name = shorten(key)[1:-1] if isinstance(key, str) else shorten(key)
    near = difflib.get_close_matches(name[:64], [*BY_ANY_NAME, *_SPECIAL], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return InvalidArgument(name, f"a known parameter{hint}", key)


_Respelt = Iterator[tuple[str, str, Any]]


def _guide(key: str, value: Any, given: Mapping[str, Any]) -> _Respelt:
    parts = dict(respell_guide(key, value)) or dict.fromkeys((TYPE, GUIDE), OFF)
    for name, part in parts.items():
        yield key, name, part


def _logprobs(key: str, value: Any, given: Mapping[str, Any]) -> _Respelt:
    """A count, or OpenAI's bool beside ``top_logprobs``."""
    top = given.get("top_logprobs")
    if not _is_bool(value):
        if top is not None:
            raise InvalidArgument(key, "true or false beside top_logprobs", value)
        yield key, "logprobs", value
    elif FIELDS["stream"].coerce(value, given_as=key):
        yield key, "logprobs", 0 if top is None else FIELDS["logprobs"].coerce(top, given_as="top_logprobs")
    else:
        yield key, "logprobs", OFF


def _top_logprobs(key: str, value: Any, given: Mapping[str, Any]) -> _Respelt:
    """Read with ``logprobs``; without it nothing was asked for, unless a count says otherwise."""
    count = FIELDS["logprobs"].coerce(value, given_as=key)
    switch = given.get("logprobs")
    is_off = switch is None or (_is_bool(switch) and not FIELDS["stream"].coerce(switch))
    if count and is_off:
        raise InvalidArgument(key, "0 unless logprobs is true", value)
    yield from ()


def _do_sample(key: str, value: Any, given: Mapping[str, Any]) -> _Respelt:
    """transformers' switch: false is greedy; true needs a temperature, which may come from another source."""
    samples = FIELDS["stream"].coerce(value, given_as=key)
    temperature = FIELDS["temperature"].coerce(given.get("temperature"))
    if samples:
        yield key, SAMPLES, True
    elif temperature is None:
        yield key, "temperature", 0.0
    elif temperature:
        raise _no_sampling(value)


def check_samples(values: Mapping[str, Any]) -> None:
    """InvalidArgument where merged parameters have ``do_sample`` true, and no temperature to sample at."""
    if values.get(SAMPLES) and not values.get("temperature"):
        raise _no_sampling(True)


def _no_sampling(value: Any) -> InvalidArgument:
    return InvalidArgument(SAMPLES, "false (greedy), or true beside a temperature above 0", value)


def _neutral(key: str, value: Any, given: Mapping[str, Any]) -> _Respelt:
    neutral = NEUTRAL[key]
    field = Field(name=key, kind="bool" if isinstance(neutral[0], bool) else "float", doc="")
    if field.coerce(value) not in neutral:
        raise Unsupported(key, "only " + " or ".join(str(item).lower() for item in neutral), value)
    yield from ()


def _unsupported(key: str, value: Any, given: Mapping[str, Any]) -> _Respelt:
    raise Unsupported(key, UNSUPPORTED[key], value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in ("true", "false"))


_SPECIAL: Mapping[str, Callable[[str, Any, Mapping[str, Any]], _Respelt]] = {
    "logprobs": _logprobs,
    "top_logprobs": _top_logprobs,
    "do_sample": _do_sample,
    **dict.fromkeys(GUIDES, _guide),
    **dict.fromkeys(NEUTRAL, _neutral),
    **dict.fromkeys(UNSUPPORTED, _unsupported),
}
