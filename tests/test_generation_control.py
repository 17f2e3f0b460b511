"""What requests ask for, on the real model: each alone equals each among all others, and guided text always parses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from mstar.llm import LLM, Completion, SamplingParams

pytestmark = pytest.mark.model

PROMPT = "The history of the lighthouse begins with a fire on a hill. Sailors"
# One request of each kind of wish, and of several at once.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 2},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 1.0, "top_k": 5, "seed": 4},
    {"temperature": 1.0, "top_p": 0.5, "seed": 5},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 6},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "top_p_first": True, "seed": 6},
    {"temperature": 1.0, "top_p": 0.1, "top_p_min_keep": 4, "seed": 7},
    {"temperature": 1.0, "min_p": 0.1, "seed": 8},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "repetition_penalty": 1.3, "penalize_prompt": False},
    {"temperature": 0, "repetition_penalty": 1.2, "repetition_window": 4},
    {"temperature": 0.7, "repetition_penalty": 1.2, "repetition_window": 64, "seed": 9},
    {"temperature": 0, "presence_penalty": 1.5},
    {"temperature": 0, "frequency_penalty": 1.0},
    {"temperature": 0.9, "presence_penalty": -0.5, "frequency_penalty": 0.5, "seed": 10},
    {"temperature": 0, "logit_bias": {"260": 100}, "max_tokens": 6},
    {"temperature": 0, "logit_bias": {"260": -100, "28": -100, "30": -100}},
    {"temperature": 0, "bad_words": ["the", "light", "fire on"]},
    {"temperature": 1.0, "allowed_token_ids": list(range(200, 400)), "seed": 11},
    {"temperature": 0, "stop": [".", "\n"]},
    {"temperature": 0, "stop_token_ids": [30, 28, 284]},
    {"temperature": 0, "stop_token_ids": [30, 28, 284], "min_tokens": 15},
    {"temperature": 0.8, "min_tokens": 10, "stop": ["e"], "include_stop_str_in_output": True, "seed": 12},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0.9, "logprobs": 0, "seed": 13},
    {"temperature": 0, "prompt_logprobs": 2, "logprobs": 1},
    {"temperature": 0, "guided_decoding_guide_type": "regex", "guided_decoding_guide": r"[0-9]{3}-[0-9]{4}"},
    {"temperature": 1.0, "seed": 14, "guided_decoding_guide_type": "choice", "guided_decoding_guide": '["a", "no"]'},
    {"temperature": 0.8, "seed": 15, "ignore_eos": True},
    {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
        "logit_bias": {"260": 1.5},
        "bad_words": ["lighthouse"],
        "min_tokens": 5,
        "logprobs": 2,
        "seed": 16,
    },
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"max_seq_len": 320, "max_running_requests": 48, "deterministic": True}
    with LLM("smollm2-135m", **options) as loaded:
        yield loaded


def test_32_requests_with_32_settings_give_what_each_gives_alone(llm: LLM) -> None:
    params = [{"max_tokens": 16} | settings for settings in SETTINGS]
    assert len(params) == 32
    together = llm.generate([PROMPT] * 32, params)
    for own, completion in zip(params, together, strict=True):
        [alone] = llm.generate(PROMPT, own)
        assert _told(completion) == _told(alone), own
    assert len({tuple(completion.output_ids) for completion in together}) > 24  # the settings do something


def _told(completion: Completion) -> tuple[Any, ...]:
    return completion.output_ids, completion.text, completion.finish_reason, completion.stop_reason, completion.logprobs


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10}
DRAWN: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_tokens": 10}
FIRST = 736  # the greedy text begins with it
# Parameter -> what is asked for without it, and what it adds: the answer must change.
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_tokens": (GREEDY, {"max_tokens": 3}),
    "min_tokens": (GREEDY | {"stop_token_ids": [FIRST]}, {"min_tokens": 6}),
    "temperature": (GREEDY | {"seed": 5}, {"temperature": 1.5}),
    "top_k": (DRAWN, {"top_k": 1}),
    "top_p": (DRAWN, {"top_p": 0.1}),
    "min_p": (DRAWN, {"min_p": 1.0}),
    "repetition_penalty": (GREEDY, {"repetition_penalty": 1.8}),
    "presence_penalty": (GREEDY, {"presence_penalty": 2}),
    "frequency_penalty": (GREEDY | {"presence_penalty": -2}, {"frequency_penalty": -2}),
    "repetition_window": (GREEDY | {"repetition_penalty": 1.8}, {"repetition_window": 8}),
    "penalize_prompt": (GREEDY | {"repetition_penalty": 1.8}, {"penalize_prompt": False}),
    "top_p_first": (DRAWN | {"top_k": 5, "top_p": 0.3}, {"top_p_first": True}),
    "top_p_min_keep": (DRAWN | {"top_p": 1e-3}, {"top_p_min_keep": 50}),
    "seed": (DRAWN, {"seed": 6}),
    "n": (DRAWN, {"n": 2}),
    "ignore_eos": (GREEDY | {"logit_bias": {2: 100}}, {"ignore_eos": True}),
    "stop": (GREEDY, {"stop": ["top"]}),
    "stop_token_ids": (GREEDY, {"stop_token_ids": [FIRST]}),
    "include_stop_str_in_output": (GREEDY | {"stop": ["top"]}, {"include_stop_str_in_output": True}),
    "bad_words": (GREEDY, {"bad_words": ["would"]}),
    "allowed_token_ids": (GREEDY, {"allowed_token_ids": [260, 288]}),
    "logit_bias": (GREEDY, {"logit_bias": {FIRST: -100}}),
    "logprobs": (GREEDY, {"logprobs": 0}),
    "prompt_logprobs": (GREEDY, {"prompt_logprobs": 0}),
    "guided_decoding_guide_type": (GREEDY, {"guided_decoding_guide_type": "json"}),
    "guided_decoding_guide": (
        GREEDY | {"guided_decoding_guide_type": "choice", "guided_decoding_guide": ["yes"]},
        {"guided_decoding_guide": ["no"]},
    ),
    "skip_special_tokens": (GREEDY | {"allowed_token_ids": [1]}, {"skip_special_tokens": False}),
}
# A deadline is a matter of time (tests/test_llm.py), these spaces are in no text, and the others say who goes first and
# which pages are shared (tests/conductor).
WITHOUT_EFFECT_HERE = {
    "timeout_ms", "spaces_between_special_tokens", "request_priority", "tenant", "cache_salt", "no_cache",
}  # fmt: skip


def test_every_parameter_changes_what_it_is_about(llm: LLM) -> None:
    assert set(EFFECTS) | WITHOUT_EFFECT_HERE == set(SamplingParams.__struct_fields__)
    params = [own for base, added in EFFECTS.values() for own in (base, base | added)]
    answers = iter(llm.generate([PROMPT] * len(params), params))
    by_params = [[next(answers) for _ in range(own.get("n", 1))] for own in params]
    for name, without, with_it in zip(EFFECTS, by_params[::2], by_params[1::2], strict=True):
        assert without != with_it, name


def test_a_stop_id_that_counts_as_output_has_its_logprob(llm: LLM) -> None:
    asked = GREEDY | {"logprobs": 1}
    (whole,) = llm.generate(PROMPT, asked)
    stop = whole.output_ids[4]
    at = whole.output_ids.index(stop) + 1
    asked |= {"stop_token_ids": [stop], "include_stop_str_in_output": True}
    (kept,) = llm.generate(PROMPT, asked)
    assert (kept.output_ids, kept.logprobs) == (whole.output_ids[:at], whole.logprobs[:at])
    pieces = list(llm.stream(PROMPT, asked))
    assert [position for piece in pieces for position in piece.logprobs] == kept.logprobs


def test_a_seeded_request_draws_the_same_beside_any_neighbours(llm: LLM) -> None:
    a, b, c, d = ({"temperature": 0.8, "seed": 42}, {"temperature": 0.8}, {"seed": 7, "top_p": 0.9}, {"temperature": 0})
    seeded = [{"temperature": 0.8, "seed": seed} for seed in range(5)]
    batches = [[a], [a, b], [a, c], [d, a], [d, c, b, a], [a], [a, *seeded]]
    drawn = set()
    for batch in batches:
        done = llm.generate([PROMPT] * len(batch), [{"max_tokens": 6} | own for own in batch])
        drawn.add(tuple(done[batch.index(a)].output_ids))
    assert len(drawn) == 1
    assert len({tuple(completion.output_ids) for completion in done}) == 6


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NAME = {"type": "string", "maxLength": 6}
SCHEMAS: list[dict[str, Any]] = [
    _object(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 130}),
    _object(ok={"type": "boolean"}, kind={"enum": ["ship", "lamp", "sea"]}),
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "minItems": 1, "maxItems": 4},
    _object(point=_object(x={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500}, y={"const": 7})),
    {"anyOf": [_object(a={"type": "null"}), _object(b={"type": "boolean"})]},
    _object(tags={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}),
    _object(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, name=NAME),
    {"$defs": {"leaf": _object(v=NAME)}, **_object(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"})},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "maxProperties": 2},
    _object(day={"type": "string", "format": "date"}, price={"type": "number", "minimum": 0, "maximum": 100}),
]


def test_200_guided_requests_of_10_schemas_all_parse_and_validate_while_others_run(llm: LLM) -> None:
    guided = [
        {
            "max_tokens": 160,
            "temperature": 1.0,
            "seed": index,
            "guided_decoding_guide_type": "json_schema",
            "guided_decoding_guide": json.dumps(SCHEMAS[index % len(SCHEMAS)]),
        }
        for index in range(200)
    ]
    others = [{"max_tokens": 24, "temperature": 0.8, "seed": index} for index in range(8)]
    params = [own for index in range(8) for own in [*guided[index * 25 : (index + 1) * 25], others[index]]]
    completions = llm.generate(["An entry as JSON:\n"] * len(params), params)
    for own, completion in zip(params, completions, strict=True):
        if "guided_decoding_guide" not in own:
            [alone] = llm.generate("An entry as JSON:\n", own)
            assert completion.output_ids == alone.output_ids
            continue
        assert completion.finish_reason == "stop", completion.text
        jsonschema.validate(
            json.loads(completion.text),
            json.loads(own["guided_decoding_guide"]),
            format_checker=jsonschema.FormatChecker(),
        )
