"""Per-request parameters: the one table from which parsing, errors and documentation come."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from mstar.runtime.fields import FLOAT32_MAX, INT64_MAX, Field
from mstar.utils.errors import InvalidArgument, shorten

GREEDY_BELOW = 1e-5  # a temperature under this is 0: dividing by it would overflow, and its draw is the maximum
SMALLEST_TOP_P = 1e-9  # any value under 1 / vocabulary keeps the maxima alone; float32 must not round it to 0

SAMPLING_PARAMETERS: tuple[Field, ...] = (
    Field(
        name="max_tokens",
        kind="int",
        low=0,
        high=INT64_MAX,
        unit="tokens",
        aliases=("request_output_len",),
        doc="Most tokens to generate; cut to what the context leaves. Unset: the option default_max_tokens.",
    ),
    Field(
        name="temperature",
        kind="float",
        low=0.0,
        high=FLOAT32_MAX,
        doc="Sampling temperature; 0 (and anything below 1e-5) is greedy. Unset: the model's own, else 0.6.",
    ),
    Field(
        name="top_k",
        kind="int",
        low=-1,
        high=INT64_MAX,
        aliases=("runtime_top_k",),
        doc="Sample among this many most likely tokens; -1, 0 and anything from the vocabulary's size up are off.",
    ),
    Field(
        name="top_p",
        kind="float",
        low=0.0,
        high=1.0,
        above_low=True,
        aliases=("runtime_top_p",),
        doc="Sample among the most likely tokens that hold this share of the probability; 1 is off.",
    ),
    Field(
        name="seed",
        kind="int",
        low=-1,
        high=INT64_MAX,
        aliases=("random_seed",),
        doc="Makes the draws repeatable; -1 or unset draws differently every time.",
    ),
    Field(
        name="ignore_eos",
        kind="bool",
        default=False,
        doc="Generate on after the model's end-of-sequence tokens.",
    ),
    Field(
        name="stop",
        kind="strings",
        default=(),
        low=1,
        high=1024,
        aliases=("stop_words", "stop_sequences"),
        doc="Strings that end the text; neither they nor what follows is returned.",
    ),
    Field(
        name="skip_special_tokens",
        kind="bool",
        default=True,
        doc="Leave special tokens out of the text.",
    ),
)

RESPONSE_PARAMETERS: tuple[Field, ...] = (
    Field(
        name="stream",
        kind="bool",
        default=False,
        aliases=("streaming",),
        doc="Answer with one response per piece of text instead of a single response.",
    ),
    Field(name="return_token_ids", kind="bool", default=False, doc="Also return the generated token ids."),
    Field(
        name="exclude_input_in_output",
        kind="bool",
        aliases=("sampling_param_exclude_input_from_output",),
        doc="False puts the prompt in front of the text (not with stream). Unset: the completion alone.",
    ),
)

# Front ends that speak another dialect always send these; the neutral value is all this build honours.
NEUTRAL_PARAMETERS: tuple[Field, ...] = (
    Field(name="presence_penalty", kind="float", default=0.0, low=0.0, high=0.0, doc="Accepted at 0 only."),
    Field(name="frequency_penalty", kind="float", default=0.0, low=0.0, high=0.0, doc="Accepted at 0 only."),
)

PARAMETERS: tuple[Field, ...] = SAMPLING_PARAMETERS + RESPONSE_PARAMETERS + NEUTRAL_PARAMETERS
IGNORED = frozenset({"user", "metadata", "store", "service_tier"})  # OpenAI fields without effect here

FIELDS: Mapping[str, Field] = {field.name: field for field in PARAMETERS}
_BY_ANY_NAME: Mapping[str, Field] = {name: field for field in PARAMETERS for name in (field.name, *field.aliases)}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is to be continued.  ``None`` takes the default; see :data:`SAMPLING_PARAMETERS`.

    The constructor coerces and checks every value as the table says.

    Raises:
        InvalidArgument: a value is outside its contract.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in SAMPLING_PARAMETERS:
            msgspec.structs.force_setattr(self, field.name, field.coerce(getattr(self, field.name)))
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The sampling part of a mapping of parameters; :func:`parse_parameters` gives the other part too."""
        return cls(**_select(coerce_parameters(mapping), SAMPLING_PARAMETERS))


class ResponseParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is to be answered: what a front end needs and the engine doesn't."""

    stream: bool = False
    return_token_ids: bool = False
    exclude_input_in_output: bool | None = None


def coerce_parameters(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Checked values under the parameters' own names; what was not given, or given as null, is absent.

    Results of several sources merge with ``|``, the one that wins last; then :func:`split_parameters`.

    Args:
        mapping: any names and aliases of :data:`PARAMETERS`; numbers and bools may be strings.

    Raises:
        InvalidArgument: an unknown name, one parameter under two names, or a value outside its contract; it
            names the parameter as the mapping does.
    """
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        field = _BY_ANY_NAME.get(key) if isinstance(key, str) else None
        if field is None:
            if isinstance(key, str) and key in IGNORED:
                continue
            raise unknown_parameter(key)
        if value is None:
            continue
        if field.name in values:
            others = " or ".join(name for name in (field.name, *field.aliases) if name != key)
            raise InvalidArgument(key, f"given once, not also as {others}", value)
        values[field.name] = field.coerce(value, given_as=key)
    return values


def split_parameters(values: Mapping[str, Any]) -> tuple[SamplingParams, ResponseParams]:
    """What coerced parameters say to the engine, and what they say to the front end."""
    return (
        SamplingParams(**_select(values, SAMPLING_PARAMETERS)),
        ResponseParams(**_select(values, RESPONSE_PARAMETERS)),
    )


def parse_parameters(mapping: Mapping[str, Any]) -> tuple[SamplingParams, ResponseParams]:
    """:func:`coerce_parameters` and :func:`split_parameters` of a single source."""
    return split_parameters(coerce_parameters(mapping))


def unknown_parameter(key: Any) -> InvalidArgument:
    """The error for a name no table has; it suggests the nearest known one."""
    name = shorten(key)[1:-1] if isinstance(key, str) else shorten(key)
    near = difflib.get_close_matches(name[:64], _BY_ANY_NAME, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return InvalidArgument(name, f"a known parameter{hint}", key)


def _select(values: Mapping[str, Any], fields: tuple[Field, ...]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields if field.name in values}
