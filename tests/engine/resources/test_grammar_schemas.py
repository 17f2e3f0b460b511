"""JSON schemas: whatever a grammar allows parses and validates; what it could not honour is refused."""

import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.resources.grammars import FIRST_BYTE, accepts, compiled, sampled

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["a", "b/c", 'd"', None, 1.5]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def tagged(*, required=("kind", "size")):
    """A union as pydantic writes it: which option a value is of says its property ``kind``."""
    options = {
        kind: {
            "type": "object",
            "properties": {"kind": {"const": kind}, "size": size},
            "required": list(required),
            "additionalProperties": False,
        }
        for kind, size in (("dot", {"type": "null"}), ("box", {"enum": [1, 2]}), ("bag", {"type": "boolean"}))
    }
    return {"$defs": options, "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in options]}


HONOURED = [
    tagged(),
    tagged(required=("size",)),
    {"type": "string", "format": "password", "maxLength": 9},
    {"oneOf": [{"enum": [1, "a"]}, {"const": "b"}, {"type": "object", "maxProperties": 0}]},
    PERSON,
    LIST,
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "^b": {"const": {"x": [1, None, "é"]}}}},
    {"type": "object", "required": ["x"], "minProperties": 2, "maxProperties": 3},
    {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False},
    {"type": "integer", "multipleOf": 7, "exclusiveMinimum": 8, "maximum": 1000},
    {"type": "number", "multipleOf": 0.25, "minimum": -3, "exclusiveMaximum": 3},
    {"type": "integer", "anyOf": [{"minimum": 5, "maximum": 9}, {"maximum": -5, "minimum": -7}]},
    {"oneOf": [{"type": "boolean"}, {"type": "array", "maxItems": 2, "items": {"type": "null"}}]},
    {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "null"}}}], "maxProperties": 1},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 1},
    {"type": ["string", "null"], "pattern": "^(ab|c)+$", "maxLength": 6},
    {"enum": [f"value {i}" for i in range(3000)]},
    {"$defs": {"p": {"type": "integer"}}, "$ref": "#/$defs/p", "minimum": 5, "maximum": 20},
    *({"type": "string", "format": f} for f in ("date", "date-time", "duration", "hostname", "ipv4", "ipv6", "uuid")),
]
CHECKS = jsonschema.FormatChecker()


@pytest.mark.parametrize("schema", HONOURED, ids=lambda schema: json.dumps(schema)[:60])
def test_every_text_of_a_schema_validates(schema):
    start, complete = compiled("json_schema", json.dumps(schema)).matcher, 0
    for seed in range(12):
        text = sampled(start, seed)
        if text is not None:
            complete += 1
            jsonschema.validate(json.loads(text), schema, format_checker=CHECKS)
    assert complete >= 3


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"enum": []}, "Unsatisfiable"),
        (False, "Unsatisfiable"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"type": "string", "pattern": "^a$", "minLength": 5}, "Unsatisfiable"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "Unsatisfiable"),
        ({"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13}, "Unsatisfiable"),
        ({"$ref": "#/x"}, "does not exist"),
        ({"$ref": "http://x/y"}, "must point into the schema (#/...), got 'http://x/y'"),
        ({"$ref": "#a", "$defs": {"x": {"$anchor": "a"}}}, "must point into the schema (#/...), got '#a'"),
        ({"properties": {"a": {"$id": "b"}}}, "$id must stand at the top"),
        ({"$ref": "#/x", "x": {"type": "string", "format": "idn-email"}}, "format must be one of"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "format": "idn-email"}, "format must be one of"),
        ({"type": "string", "format": "unknown"}, "format must be one of"),
        ({"type": "object", "minProperties": 2}, "minProperties must be at most 1"),
        ({"type": "integer", "multipleOf": 1000003}, "multipleOf"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]}, "multipleOf"),
        (
            {"properties": {"a": {"patternProperties": {f"^{i}x": {} for i in range(65)}}}},
            "at most 64 patterns, got 65",
        ),
        ({"const": {"a": ["\u0001"]}}, "control characters"),
        ({"type": "object", "properties": {"\x7f": {}}}, "control characters"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [{"enum": [1, 2]}, {"const": 1.0}]}, "oneOf"),
        ({"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]}, "oneOf"),
        ({"type": "foo"}, "Invalid type: foo"),
        ([], "a schema is an object or a boolean"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_satisfied_or_honoured_is_refused(schema, reason):
    with pytest.raises(ValueError, match=r"^guided_decoding_guide: a JSON schema .*, got ") as caught:
        compiled("json_schema", json.dumps(schema))
    assert reason in str(caught.value)


UNKNOWN = {
    **{key: {"type": "null"} for key in ("not", "if", "then", "else", "contains", "propertyNames")},
    **{key: {} for key in ("dependentRequired", "dependentSchemas", "dependencies")},
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), False),
    **dict.fromkeys(("minContains", "maxContains"), 1),
    "uniqueItems": True,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
}


@pytest.mark.parametrize("keyword", UNKNOWN)
def test_a_keyword_that_no_grammar_can_express_is_refused_wherever_it_stands(keyword):
    bad = {keyword: UNKNOWN[keyword]}
    for schema in (bad, {"properties": {"a": bad}}, {"type": "array", "items": {"anyOf": [bad]}}):
        with pytest.raises(ValueError, match="guided_decoding_guide"):
            compiled("json_schema", json.dumps(schema))


A = {"$ref": "#"}


@pytest.mark.parametrize(
    "schema",
    [
        A,
        {"type": "object", "properties": {"a": A}, "required": ["a"]},
        {"type": "array", "items": A, "minItems": 1},
        {"type": "array", "prefixItems": [A], "minItems": 1},
        {"type": "object", "additionalProperties": A, "required": ["x"]},
        {"anyOf": [{"type": "object", "properties": {"a": A}, "required": ["a"]}, {"allOf": [{"type": "null"}, A]}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
    ids=str,
)
def test_recursion_without_an_end_is_refused(schema):
    with pytest.raises(ValueError, match="never ends"):
        compiled("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": A}},
        {"type": "array", "items": A},
        {"type": ["object", "null"], "properties": {"a": A}, "required": ["a"]},
        {"properties": {"a": A}, "required": ["a"]},  # satisfied by what is no object
    ],
    ids=str,
)
def test_recursion_that_may_end_is_served(schema):
    texts = [sampled(compiled("json_schema", json.dumps(schema)).matcher, seed) for seed in range(8)]
    assert sum(text is not None for text in texts) >= 4


def test_a_property_whose_recursion_never_ends_is_never_begun():
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"type": "null"}}}
    schema |= {"$defs": {"a": {"$ref": "#/$defs/a"}}, "additionalProperties": False}
    assert accepts("json_schema", json.dumps(schema), "{}", '{"b":null}') == [True, True]
    assert compiled("json_schema", json.dumps(schema)).matcher.try_consume_tokens([FIRST_BYTE + c for c in b'{"a']) == 2


@pytest.mark.parametrize(
    ("format_", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01"]),
        ("date-time", ["2024-02-29t01:02:03.5+01:00"], ["2023-02-29T01:02:03Z", "2023-01-01T01:02:60Z"]),
        ("time", ["23:59:59Z", "12:00:00.25-02:00"], ["24:00:00Z", "23:59:60Z", "12:00:00"]),
        ("hostname", ["a" * 63, "a-1.b"], ["a" * 64, "-a", ".".join(["a" * 60] * 5)]),
    ],
)
def test_a_format_holds_dates_of_the_calendar_and_names_of_hosts(format_, good, bad):
    texts = [json.dumps(text) for text in good + bad]
    expected = [True] * len(good) + [False] * len(bad)
    for schema in ({"type": "string"}, {"type": ["string", "null"], "allOf": [{"minLength": 2}]}, {}):
        assert accepts("json_schema", json.dumps({**schema, "format": format_}), *texts) == expected


def random_schema(rng, depth=0):
    """A schema of the keywords that are served, for values nested at most three deep."""
    kinds = ["number", "string", "choice", "list of types"] + (["object", "array", "anyOf", "allOf", "$ref"] * 2) * (
        depth < 3
    )
    kind = rng.choice(kinds)

    def inner(most=3):
        return [random_schema(rng, depth + 1) for _ in range(rng.randint(1, most))]

    def some(**keywords):
        return {key: value for key, value in keywords.items() if rng.random() < 0.4}

    bounds = [-2, -1.5, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 2, 10]
    if kind == "number":
        low, high = (rng.choice(bounds) for _ in range(2))
        found = some(**{rng.choice(["minimum", "exclusiveMinimum"]): low})
        found |= some(
            **{rng.choice(["maximum", "exclusiveMaximum"]): high, "multipleOf": rng.choice([0.5, 2, 0.25, 3])}
        )
        return {"type": rng.choice(["number", "integer", ["number", "null"]]), **found}
    if kind == "string":
        pattern = rng.choice(["^a+$", "b", "^[a-z]{2}", "é", "^(ab|c)*$", "[^a]"])
        return {"type": "string", **some(minLength=rng.randint(0, 3), maxLength=rng.randint(1, 4), pattern=pattern)}
    if kind == "choice":
        values = [1, 1.0, 1.5, "a", "", "aé", None, True, 0, -0.0, 1e2, [1], {"a": 1}]
        return rng.choice([{"const": rng.choice(values)}, {"enum": rng.sample(values, 4)}])
    if kind == "list of types":
        types = rng.sample(["string", "number", "integer", "null", "boolean"], 2)
        return {"type": types, **some(minimum=1, maxLength=2, enum=[1, "a", None])}
    if kind == "object":
        named = {name: random_schema(rng, depth + 1) for name in rng.sample("abcd", 2)}
        found = some(properties=named, patternProperties={"^[ax]": random_schema(rng, depth + 1)})
        found |= some(required=rng.sample("abcd", 2), additionalProperties=rng.choice([False, *inner()]))
        return {"type": "object", **found, **some(minProperties=rng.randint(0, 2), maxProperties=rng.randint(0, 3))}
    if kind == "array":
        found = some(prefixItems=inner(), items=rng.choice([False, *inner()]))
        return {"type": "array", **found, **some(minItems=rng.randint(0, 3)), **some(maxItems=rng.randint(0, 4))}
    beside = random_schema(rng, 3) if rng.random() < 0.4 else {}
    return {**beside, kind: "#/$defs/" + rng.choice("pq") if kind == "$ref" else inner()}


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_texts_of_random_schemas_validate(start):
    num_texts = 0
    for seed in range(start, start + 100):
        rng = random.Random(seed)
        schema = {**random_schema(rng), "$defs": {name: random_schema(rng, 3) for name in "pq"}}
        try:
            matcher = compiled("json_schema", json.dumps(schema)).matcher
        except ValueError:
            continue
        texts = [text for each in range(4) if (text := sampled(matcher, each, most=100)) is not None]
        for text in texts:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        num_texts += len(texts)
    assert num_texts > 80


def test_a_schema_cannot_turn_off_what_keeps_it_strict():
    lax = {"whitespace_pattern": r"\s*", "lenient": True, "coerce_one_of": True}
    text = json.dumps({"type": "array", "items": {"const": 1}, "x-guidance": lax})
    assert accepts("json_schema", text, "[1, 1]", "[1,  1]") == [True, False]
    with pytest.raises(ValueError, match="uniqueItems"):
        compiled("json_schema", json.dumps({"uniqueItems": True, "x-guidance": lax}))


def test_an_escape_does_not_smuggle_a_property_past_its_schema():
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "string"}}
    texts = ['{"a":1,"b":"x"}', '{"b":"x","a":"x"}', '{"a":1,"a":"x"}', r'{"\u0061":"x"}']
    assert accepts("json_schema", json.dumps(schema), *texts) == [True, False, False, False]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.text(st.characters(codec="utf-8", categories=("L", "N")), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
@settings(max_examples=60, deadline=None)
def test_a_const_allows_its_value_alone(value):
    text = json.dumps(value, ensure_ascii=False)
    schema = json.dumps({"const": value})
    assert accepts("json_schema", schema, text, json.dumps([value, 0], ensure_ascii=False)) == [True, False]
    assert json.loads(sampled(compiled("json_schema", schema).matcher, 0)) == value
