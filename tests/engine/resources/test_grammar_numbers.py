"""Numbers in JSON schemas: whatever spelling a grammar lets through lies within the bounds."""

import itertools
import json
from decimal import Decimal

import pytest

from tests.engine.resources.grammars import accepts, compiled

TEXTS = [
    f"{sign}{whole}{rest}"
    for sign in ("", "-")
    for whole in (0, 1, 2, 3)
    for rest in ("", ".0", ".1", ".25", ".5", ".9", ".00", "e0", ".5e0", "e1", "5e-1")
]
LOWER = [{"minimum": "low"}, {"exclusiveMinimum": "low"}]
UPPER = [{"maximum": "high"}, {"exclusiveMaximum": "high"}]
BOUNDS = [Decimal(tenth) / 10 for tenth in (-30, -25, -20, -11, -10, -5, 0, 1, 5, 10, 15, 20, 21)]


def number(value):
    return int(value) if value == int(value) else float(value)


def admits(schema, text):
    """Whether a number lies within a schema's bounds, by its decimal digits."""
    value = Decimal(text)
    return (
        ("minimum" not in schema or value >= Decimal(str(schema["minimum"])))
        and ("exclusiveMinimum" not in schema or value > Decimal(str(schema["exclusiveMinimum"])))
        and ("maximum" not in schema or value <= Decimal(str(schema["maximum"])))
        and ("exclusiveMaximum" not in schema or value < Decimal(str(schema["exclusiveMaximum"])))
        and value % Decimal(str(schema.get("multipleOf", "1e-9"))) == 0
        and (schema["type"] != "integer" or value == int(value))
    )


def assert_within_bounds(schema):
    found = accepts("json_schema", json.dumps(schema), *TEXTS)
    assert [
        text for text, is_accepted in zip(TEXTS, found, strict=True) if is_accepted and not admits(schema, text)
    ] == []
    return any(found)


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize(("lower", "upper"), list(itertools.product(LOWER, UPPER)), ids=lambda bound: str(*bound))
def test_no_spelling_of_a_number_outside_passes(kind, lower, upper):
    served = 0
    for low, high in itertools.combinations(BOUNDS, 2):
        schema = {"type": kind, **dict.fromkeys(lower, number(low)), **dict.fromkeys(upper, number(high))}
        if kind == "integer" and not any(admits(schema, str(value)) for value in range(-3, 4)):
            continue
        served += assert_within_bounds(schema)
    assert served > 40


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "0"),
        ({"exclusiveMinimum": 0.0, "maximum": 0.5}, "0"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "1"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1"),
        ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, "-0"),
        ({"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.25}, "0"),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "0"),
        ({"exclusiveMinimum": 0, "allOf": [{"type": "number", "maximum": 0.5}]}, "0"),
        ({"$defs": {"a": {"exclusiveMinimum": 2}}, "$ref": "#/$defs/a", "maximum": 2.5}, "2"),
        ({"$ref": "#/parts/0", "parts": [{"exclusiveMinimum": 0}], "maximum": 0.5}, "0"),
    ],
    ids=str,
)
def test_an_excluded_integer_does_not_pass_where_the_other_bound_lies_before_the_next(bounds, text):
    inside = {"0": "0.25", "-0": "-0.25", "1": "1.25", "-1": "-1.25", "2": "2.25"}[text]
    assert accepts("json_schema", json.dumps({"type": "number", **bounds}), text, inside) == [False, True]


def test_booleans_of_draft_4_tell_whether_a_bound_is_excluded():
    schema = {"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}
    assert accepts("json_schema", json.dumps(schema), "1", "2", "3", "4") == [False, True, True, False]
    assert accepts("json_schema", json.dumps({"type": "integer", "exclusiveMaximum": True}), "7") == [True]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"minimum": 2**53 + 1}, "minimum must be a number that a double holds, got 9007199254740993"),
        ({"exclusiveMaximum": 2**63 - 1}, "exclusiveMaximum must be a number that a double holds"),
        ({"maximum": 10**400}, "maximum must be a number that a double holds"),
        ({"minimum": -(10**400)}, "minimum must be a number that a double holds"),
        ({"multipleOf": -1}, "multipleOf must be above 0, got -1"),
        ({"multipleOf": 0}, "multipleOf must be above 0, got 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bound_that_would_be_rounded_is_refused(schema, reason):
    with pytest.raises(ValueError, match=r"^guided_decoding_guide: a JSON schema") as caught:
        compiled("json_schema", json.dumps({"type": "integer", **schema}))
    assert reason in str(caught.value)


def test_bounds_that_a_double_or_64_bits_hold_are_kept():
    largest = 2**63 - 1
    assert accepts(
        "json_schema", json.dumps({"type": "integer", "maximum": largest}), str(largest), str(largest + 1)
    ) == [
        True,
        False,
    ]
    schema = {"type": "integer", "minimum": 2**53 + 2}
    assert accepts("json_schema", json.dumps(schema), str(2**53 + 1), str(2**53 + 2)) == [False, True]
