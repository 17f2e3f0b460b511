"""Per-request parameters: from any spelling a client uses to checked values."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import msgspec

from mstar.runtime.fields import Field
from mstar.runtime.guides import check_guide
from mstar.runtime.param_table import BY_ANY_NAME, FIELDS, PARAMETERS, RESPONSE_PARAMETERS, SAMPLING_PARAMETERS
from mstar.runtime.spellings import OFF, SAMPLES, check_samples, respell
from mstar.utils.errors import InvalidArgument

__all__ = [
    "FIELDS", "GREEDY_BELOW", "PARAMETERS", "RESPONSE_PARAMETERS", "SAMPLING_PARAMETERS", "SMALLEST_TOP_P",
    "ResponseParams", "SamplingParams", "coerce_parameters", "parse_parameters", "split_parameters",
]  # fmt: skip

# A temperature under this is 0: dividing by it would overflow, and its draw is the maximum.  1e-5 as float32 has it,
# so that the tensor and the number in JSON are on the same side.
GREEDY_BELOW = 9.999999747378752e-06
SMALLEST_TOP_P = 1e-9  # any value under 1 / vocabulary keeps the maxima alone; float32 must not round it to 0


# What Python code asks for instead of a response parameter.
_INSTEAD = {
    "stream": "LLM.stream gives a text as it is made",
    "return_token_ids": "every completion has output_ids",
    "exclude_input_in_output": "a completion is the new text alone",
    "return_log_probs": "logprobs=0 gives them",
    "return_cumulative_logprob": "logprobs=0 gives it",
}


class _AnySpelling(msgspec.StructMeta):
    """Lets a constructor take what a mapping of parameters may say.  Values that are coerced go past it."""

    def __call__(cls, **given: Any) -> Any:
        for key, value in given.items():
            field = BY_ANY_NAME.get(key)
            if value is not None and field is not None and field.name in _INSTEAD:
                raise InvalidArgument(key, f"no sampling parameter, {_INSTEAD[field.name]}", value)
        values = coerce_parameters({
            key: value for key, value in given.items() if key not in FIELDS or value is not FIELDS[key].default
        })  # fmt: skip
        check_samples(values)
        return super().__call__(**_select(values, SAMPLING_PARAMETERS))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=_AnySpelling):
    """How one request is to be continued."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_window: int = 0
    penalize_prompt: bool = True
    top_p_first: bool = False
    top_p_min_keep: int = 1
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding_guide_type: str | None = None
    guided_decoding_guide: str | None = None
    timeout_ms: int = 0
    request_priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    no_cache: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in SAMPLING_PARAMETERS:
            value = getattr(self, field.name)
            if value is not field.default:
                self._set(field.name, field.coerce(value))
        if self.seed == -1:
            self._set("seed", None)
        if self.guided_decoding_guide_type is not None or self.guided_decoding_guide is not None:
            self._set("guided_decoding_guide", check_guide(self.guided_decoding_guide_type, self.guided_decoding_guide))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """The sampling part of a mapping of parameters: what concerns the response alone is passed over."""
        return split_parameters(coerce_parameters(mapping))[0]

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)


class ResponseParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is to be answered: what a front end needs and the engine doesn't."""

    stream: bool = False
    return_token_ids: bool = False
    exclude_input_in_output: bool | None = None
    return_log_probs: bool = False
    return_cumulative_logprob: bool = False


def coerce_parameters(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Checked values under the parameters' own names; what was not given, or given as null, is absent.  What another
    engine's spelling turns off (``response_format`` text, ``logprobs`` false) is None.

    Results of several sources merge with ``|``, the one that wins last; then :func:`split_parameters`.

    Args:
        mapping: any names and aliases of :data:`PARAMETERS`, and the spellings of other engines that
            :mod:`mstar.runtime.spellings` lists; numbers and bools may be strings.

    Raises:
        InvalidArgument: an unknown name, one parameter under two names, or a value outside its contract; it
            names the parameter as the mapping does.
        Unsupported: a parameter of another engine that this one cannot honour.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}  # parameter -> the name it was given under
    turned_off = []
    for key, name, value in respell(mapping):
        if value is OFF:
            turned_off.append(name)
            continue
        if name in values:
            raise InvalidArgument(key, f"given once, not also as {names[name]}", mapping[key])
        values[name] = value if name == SAMPLES else FIELDS[name].coerce(value, given_as=key)
        names[name] = key
    return dict.fromkeys(turned_off) | values


def split_parameters(values: Mapping[str, Any]) -> tuple[SamplingParams, ResponseParams]:
    """What coerced parameters say to the engine, and what they say to the front end.

    Raises:
        InvalidArgument: parameters of different sources that don't go together.
    """
    check_samples(values)
    return (
        msgspec.StructMeta.__call__(SamplingParams, **_select(values, SAMPLING_PARAMETERS)),
        ResponseParams(**_select(values, RESPONSE_PARAMETERS)),
    )


def parse_parameters(mapping: Mapping[str, Any]) -> tuple[SamplingParams, ResponseParams]:
    """:func:`coerce_parameters` and :func:`split_parameters` of a single source."""
    return split_parameters(coerce_parameters(mapping))


def _select(values: Mapping[str, Any], fields: tuple[Field, ...]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields if field.name in values}


def _documentation() -> str:
    lines = [
        "How one request is to be continued; the constructor coerces and checks every value.",
        "",
        "``SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=64, stop='END')``",
        "",
        "None takes the default.  Numbers and bools may be strings; a bool is never a number, NaN and infinities are",
        "refused.  Names and forms of other engines are taken too: ``max_new_tokens=5``, ``guided_json={...}``.",
        "",
        "Attributes:",
    ]
    for field in SAMPLING_PARAMETERS:
        unit = f", in {field.unit}" if field.unit else ""
        facts = f"{field.allowed}{unit}; default {_shown(field.default)}"
        aliases = f"  Also: {', '.join(field.aliases)}." if field.aliases else ""
        text = f"{field.name}: {field.doc}  ({facts}){aliases}"
        lines += textwrap.wrap(text, 112, initial_indent="    ", subsequent_indent="        ")
    lines += [
        "",
        "Raises:",
        "    InvalidArgument: an unknown name, or a value outside its contract; names it.",
        "    Unsupported: a parameter of another engine that this one cannot honour.",
        "",
    ]
    return "\n".join(lines)


def _shown(default: Any) -> str:
    return "unset" if default in (None, (), "") else str(default)


SamplingParams.__doc__ = _documentation()
