"""Guides in every spelling, and what is refused before the engine sees them."""

import json

import pytest

from mstar.engine.resources.grammar.config import MAX_GUIDE_BYTES
from mstar.runtime.params import SamplingParams, coerce_parameters
from mstar.utils.errors import InvalidArgument, Unsupported

SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
GRAMMAR = 'root ::= "a"+'


def guide_of(mapping):
    params = SamplingParams.from_mapping(mapping)
    return params.guided_decoding_guide_type, params.guided_decoding_guide


def typed(kind, guide=None):
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (typed("json"), ("json", None)),
        (typed("json", ""), ("json", None)),
        (typed("json_schema", TEXT), ("json_schema", TEXT)),
        (typed("json_schema", SCHEMA), ("json_schema", TEXT)),
        (typed("json_schema", "true"), ("json_schema", "true")),
        (typed("regex", "[0-9]+"), ("regex", "[0-9]+")),
        (typed("ebnf_grammar", GRAMMAR), ("ebnf_grammar", GRAMMAR)),
        (typed("choice", '["a", "b"]'), ("choice", '["a", "b"]')),
        (typed("choice", ["a", "b"]), ("choice", '["a", "b"]')),
        (typed(None, ""), (None, None)),
        ({"guided_json": SCHEMA}, ("json_schema", TEXT)),
        ({"guided_json": TEXT}, ("json_schema", TEXT)),
        ({"guided_json": {}}, ("json_schema", "{}")),
        ({"guided_json_object": True}, ("json", None)),
        ({"guided_json_object": "true"}, ("json", None)),
        ({"guided_json_object": False}, (None, None)),
        ({"guided_regex": "[0-9]+"}, ("regex", "[0-9]+")),
        ({"guided_grammar": GRAMMAR}, ("ebnf_grammar", GRAMMAR)),
        ({"guided_choice": ["a", "ä"]}, ("choice", '["a", "ä"]')),
        ({"guided_choice": ("a",)}, ("choice", '["a"]')),
        ({"guided_choice": '["a", "b"]'}, ("choice", '["a", "b"]')),
        ({"guided_decoding": {"regex": "a", "json": None, "json_object": False}}, ("regex", "a")),
        ({"guided_decoding": {}}, (None, None)),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", TEXT)),
        ({"structured_outputs": json.dumps({"choice": ["a"]})}, ("choice", '["a"]')),
        ({"structured_outputs": {"json_object": True}}, ("json", None)),
        ({"structured_outputs": {"grammar": GRAMMAR}}, ("ebnf_grammar", GRAMMAR)),
        ({"response_format": {"type": "text"}}, (None, None)),
        ({"response_format": {"type": "json_object"}}, ("json", None)),
        ({"response_format": '{"type": "json_object"}'}, ("json", None)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            ("json_schema", TEXT),
        ),
    ],
)  # fmt: skip
def test_a_guide_in_any_spelling_is_a_type_and_a_text(given, expected):
    assert guide_of(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (typed("xml", "x"), "guided_decoding_guide_type: one of json, json_schema, .*, got 'xml'"),
        (typed("regex"), "guided_decoding_guide: needed beside guided_decoding_guide_type regex"),
        (typed("regex", ""), "guided_decoding_guide: needed beside guided_decoding_guide_type regex"),
        (typed(None, "[0-9]+"), "guided_decoding_guide_type: one of json, .* beside guided_decoding_guide, got 'none'"),
        (typed("json", TEXT), "guided_decoding_guide: none beside type json"),
        (typed("json_schema", "{"), "guided_decoding_guide: a JSON schema, got '{'"),
        (typed("json_schema", "3"), "guided_decoding_guide: a JSON schema: an object, true or false, got '3'"),
        (typed("json_schema", '{"minimum": NaN}'), "guided_decoding_guide: a JSON schema"),
        (typed("json_schema", {"minimum": float("nan")}), "guided_decoding_guide: a string or JSON value"),
        (typed("json_schema", "[" * 100_000), "guided_decoding_guide: a JSON schema"),
        (typed("json_schema", '{"not": {"a": 1, "a": 1}}'), "guided_decoding_guide: a JSON schema with each key once"),
        (typed("choice", "a"), "guided_decoding_guide: a JSON list of strings, got 'a'"),
        (typed("choice", []), "guided_decoding_guide: a JSON list of at least one string"),
        (typed("choice", ["a", ""]), "guided_decoding_guide: a JSON list of at least one string, none of them empty"),
        (typed("choice", ["a", 3]), "guided_decoding_guide: a JSON list of at least one string"),
        (typed("regex", "a" * (MAX_GUIDE_BYTES + 1)), "guided_decoding_guide: a string or JSON value of 0 to 262144"),
        (typed("regex", "ä" * (MAX_GUIDE_BYTES // 2 + 1)), "guided_decoding_guide: at most 256 KiB, got '26"),
        (typed("regex", "\ud800"), "guided_decoding_guide: valid UTF-8"),
        ({"guided_json": "{"}, "guided_json: a JSON schema"),
        ({"guided_json": 3}, "guided_json: a JSON schema: an object, true or false, got 3"),
        ({"guided_json": ""}, "guided_json: not empty"),
        ({"guided_regex": 3}, "guided_regex: a string, got 3"),
        ({"guided_regex": ""}, "guided_regex: not empty"),
        ({"guided_choice": "yes"}, "guided_choice: a list of strings, got 'yes'"),
        ({"guided_choice": []}, "guided_choice: not empty"),
        ({"guided_choice": [1]}, "guided_choice: a JSON list of at least one string"),
        ({"guided_json_object": 1}, "guided_json_object: true or false"),
        ({"guided_decoding": "x"}, "guided_decoding: a JSON object"),
        ({"guided_decoding": {"regex": "a", "choice": ["b"]}}, "guided_decoding: one of json, regex, .*, got ..choice"),
        ({"guided_decoding": {"regex": 3}}, "guided_decoding.regex: a string"),
        ({"response_format": {"type": "yaml"}}, "response_format.type: one of text, json_object, .* got 'yaml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: an object with schema, got None"),
        ({"response_format": []}, "response_format: a JSON object"),
    ],
)  # fmt: skip
def test_a_guide_that_cannot_be_one_is_refused_as_it_was_spelt(given, message):
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        SamplingParams.from_mapping(given)


@pytest.mark.parametrize(
    "given",
    [
        {"guided_json": SCHEMA, "guided_regex": "a"},
        {"guided_regex": "a", "guided_decoding_guide_type": "json"},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    ],
)
def test_at_most_one_guide(given):
    with pytest.raises(InvalidArgument, match="given once, not also as "):
        coerce_parameters(given)


def test_what_no_guide_here_can_do_is_unsupported():
    with pytest.raises(Unsupported, match=r"^structured_outputs.structural_tag: nothing but json, regex"):
        coerce_parameters({"structured_outputs": {"structural_tag": "x"}})


def test_a_guide_of_a_later_source_replaces_an_earlier_one():
    for later in ({"guided_json_object": True}, typed("regex", "a"), {"guided_choice": ["a"]}):
        merged = coerce_parameters({"guided_json": SCHEMA}) | coerce_parameters(later)
        assert guide_of(merged) == guide_of(later)


def test_the_largest_guide_is_taken():
    assert guide_of(typed("regex", "a" * MAX_GUIDE_BYTES)) == ("regex", "a" * MAX_GUIDE_BYTES)


def test_the_constructor_checks_a_guide_too():
    assert (
        SamplingParams(guided_decoding_guide_type="choice", guided_decoding_guide=["a"]).guided_decoding_guide
        == '["a"]'
    )
    with pytest.raises(InvalidArgument, match="guided_decoding_guide"):
        SamplingParams(guided_decoding_guide_type="json_schema", guided_decoding_guide="{")
