"""One value against one row of a table."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.runtime.fields import INT64_MAX, Field
from mstar.utils.errors import InvalidArgument

COUNT = Field(name="count", kind="int", low=-1, high=INT64_MAX, default=7, doc="")
SHARE = Field(name="share", kind="float", low=0.0, high=1.0, above_low=True, default=0.5, doc="")
SWITCH = Field(name="switch", kind="bool", default=False, doc="")
WORDS = Field(name="words", kind="strings", low=1, high=5, max_items=3, default=(), doc="")
SIZE = Field(name="size", kind="bytes", low=1, high=2**50, doc="")
IDS = Field(name="ids", kind="ints", low=0, high=9, min_items=1, max_items=3, doc="")
BIASES = Field(name="biases", kind="biases", low=-10.0, high=10.0, max_items=2, doc="")
ANY = Field(name="any", kind="json", low=1, high=20, doc="")


@pytest.mark.parametrize(
    "value", [40, "40", 40.0, "40.0", " 40 ", "4e1", "+40", np.int32(40), np.float32(40), Fraction(40)]
)
def test_whole_numbers_in_any_form_are_integers(value):
    result = COUNT.coerce(value)
    assert (result, type(result)) == (40, int)


@pytest.mark.parametrize(
    "value",
    [True, np.bool_(True), "true", 1.5, "1.5", -2, "-2", 2**63, 1 << 16600, "9" * 30, "1e400", "1e99999", math.nan,
     math.inf, -math.inf, "nan", "inf", "1_000", "0x10", "", " ", "٤٠", [1], {}, b"1", "1" * 100_000],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_no_integer_in_range_is_refused_by_name(value):
    with pytest.raises(InvalidArgument, match=r"^count: an integer >= -1 and <= 2\^63-1, got ") as caught:
        COUNT.coerce(value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "value", [0, -0.0, 1.0001, "0", math.nan, "NaN", "Infinity", "1e999", True, "hot", None.__class__, 1 << 1400]
)
def test_what_is_no_finite_number_in_range_is_refused(value):
    with pytest.raises(InvalidArgument, match="share: a finite number > 0 and <= 1"):
        SHARE.coerce(value)


@pytest.mark.parametrize("value", [0.25, "0.25", "25e-2", ".25", np.float32(0.25), Fraction(1, 4)])
def test_numbers_in_any_form_are_floats(value):
    assert SHARE.coerce(value) == 0.25


@pytest.mark.parametrize(
    ("value", "expected"), [(True, True), ("false", False), ("True", True), (np.bool_(False), False)]
)
def test_bools_and_their_words_are_bools(value, expected):
    assert SWITCH.coerce(value) is expected


@pytest.mark.parametrize("value", [1, 0, "1", "yes", "", 1.0])
def test_a_number_is_no_bool(value):
    with pytest.raises(InvalidArgument, match="switch: true or false"):
        SWITCH.coerce(value)


def test_a_string_is_a_list_of_one_and_repetitions_count_once():
    assert WORDS.coerce("ab") == ("ab",)
    assert WORDS.coerce(["b", "a", "b"]) == ("b", "a")
    assert WORDS.coerce([]) == ()


@pytest.mark.parametrize("value", ["", ["a", ""], ["a", 3], "toolong", ["a", "b", "c", "d"], 3, {"a": 1}, b"a"])
def test_lists_are_bounded_in_number_and_length(value):
    with pytest.raises(InvalidArgument, match="words: strings of 1 to 5 characters, at most 3 of them"):
        WORDS.coerce(value)


@pytest.mark.parametrize("value", [(1, 2), [1, "2"], "1,2", "1, 2,", np.array([1, 2]), {1: 0, 2: 0}.keys()])
def test_lists_of_integers_come_in_any_form(value):
    assert IDS.coerce(value) == (1, 2)


@pytest.mark.parametrize("value", [2, "2", 2.0, np.int64(2)])
def test_a_number_is_a_list_of_one(value):
    assert IDS.coerce(value) == (2,)


@pytest.mark.parametrize("value", [[], "", [10], [-1], [1, 2, 3, 4], [1.5], [True], {"1": 2}, "x"])
def test_lists_of_integers_are_bounded(value):
    with pytest.raises(InvalidArgument, match="ids: integers >= 0 and <= 9, 1 to 3 of them, got "):
        IDS.coerce(value)


@pytest.mark.parametrize("value", [{5: 1, 6: 99}, {"5": "1", " 6": "99"}, {5.0: 1.0, 6: 10}, '{"5": 1, "6": 1e30}'])
def test_biases_are_numbers_by_id_cut_to_the_bounds(value):
    result = BIASES.coerce(value)
    assert result == {5: 1.0, 6: 10.0}
    assert {(type(key), type(number)) for key, number in result.items()} == {(int, float)}


@pytest.mark.parametrize(
    "value", [[5], 5, "x", "[1]", {-1: 1}, {2**31: 1}, {"a": 1}, {5: math.nan}, {5: "inf"}, {5: True}, {5: None},
              {True: 1}, {1: 1, 2: 2, 3: 3}]
)  # fmt: skip
def test_biases_of_what_is_no_id_or_no_number_are_refused(value):
    with pytest.raises(
        InvalidArgument, match="biases: an object of token ids to finite numbers, at most 2 of them, got"
    ):
        BIASES.coerce(value)


@pytest.mark.parametrize(
    ("value", "expected"), [("as it is {", "as it is {"), ({"ä": [1]}, '{"ä": [1]}'), (["a"], '["a"]'), (True, "true")]
)
def test_any_json_value_is_its_text(value, expected):
    assert ANY.coerce(value) == expected


@pytest.mark.parametrize("value", ["", "x" * 21, {"a": math.nan}, {1, 2}, {"a": object}, ["x" * 30]])
def test_what_has_no_json_text_in_bounds_is_refused(value):
    with pytest.raises(InvalidArgument, match="any: a string or JSON value of 1 to 20 characters"):
        ANY.coerce(value)


@pytest.mark.parametrize(
    ("value", "expected"), [("512", 512), ("1.5KiB", 1536), ("2 GiB", 2**31), ("3m", 3 * 2**20), (9, 9)]
)
def test_sizes_take_units(value, expected):
    assert SIZE.coerce(value) == expected


@pytest.mark.parametrize("value", ["0", "1 parsec", "-1KiB", "1e9TiB", "9999999999999TiB"])
def test_sizes_out_of_range_are_refused(value):
    with pytest.raises(InvalidArgument, match="size: a number of bytes"):
        SIZE.coerce(value)


def test_none_is_the_default():
    assert (COUNT.coerce(None), SHARE.coerce(None), WORDS.coerce(None), SIZE.coerce(None)) == (7, 0.5, (), None)


def test_an_error_names_the_field_as_the_client_did():
    with pytest.raises(InvalidArgument, match=r"^other_name: "):
        COUNT.coerce(-5, given_as="other_name")


@given(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.text()),
        st.lists(st.integers()), st.dictionaries(st.one_of(st.integers(), st.text()), st.floats()),
    )
)  # fmt: skip
def test_any_value_is_coerced_or_refused(value):
    for field in (COUNT, SHARE, SWITCH, WORDS, SIZE, IDS, BIASES, ANY):
        try:
            result = field.coerce(value)
        except InvalidArgument:
            continue
        assert field.coerce(result) == result
