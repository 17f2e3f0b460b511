"""JSON in which every key counts."""

import pytest

from mstar.runtime.json_text import DuplicateKey, parse_json


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "b": 2}', '[{"c": {"b": 1, "b": {}}}]'])
def test_a_key_given_twice_at_any_depth_is_an_error_that_names_it(text):
    with pytest.raises(DuplicateKey, match="each key once, not twice 'b'"):
        parse_json(text)


@pytest.mark.parametrize("text", ["", "{", "nope", "[" * 100_000, "1" * 5000])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"Expecting|nested too deeply|Exceeds the limit"):
        parse_json(text)


def test_the_same_key_in_different_objects_is_fine():
    assert parse_json('[{"a": 1}, {"a": {"a": 2}}]') == [{"a": 1}, {"a": {"a": 2}}]


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_pass_only_where_they_may(name):
    assert str(parse_json(f"[{name}]")[0]) == str(float(name))
    with pytest.raises(ValueError, match=f"^{name} is no JSON"):
        parse_json(f"[{name}]", allow_nan=False)
