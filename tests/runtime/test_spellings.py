"""Parameters that other engines spell in another way than by another name."""

import pytest

from mstar.runtime.params import SamplingParams, coerce_parameters, split_parameters
from mstar.runtime.spellings import NEUTRAL, UNSUPPORTED
from mstar.utils.errors import InvalidArgument, Unsupported


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": "true", "top_logprobs": 5}, 5),
        ({"logprobs": True, "top_logprobs": "3"}, 3),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": 4}, 4),
        ({"logprobs": 0}, 0),
        ({}, None),
    ],
)
def test_logprobs_are_a_count_or_a_switch_beside_a_count(given, expected):
    assert SamplingParams.from_mapping(given).logprobs == expected


@pytest.mark.parametrize(
    ("before", "off", "names"),
    [
        (
            {"guided_regex": "a+"},
            {"response_format": {"type": "text"}},
            ("guided_decoding_guide", "guided_decoding_guide_type"),
        ),
        ({"guided_decoding_guide_type": "json"}, {"guided_json_object": False}, ("guided_decoding_guide_type",)),
        ({"logprobs": 3}, {"logprobs": False}, ("logprobs",)),
    ],
)
def test_what_a_later_source_turns_off_is_off(before, off, names):
    params, _ = split_parameters(coerce_parameters(before) | coerce_parameters(off))
    assert all(getattr(params, name) is None for name in names)
    params, _ = split_parameters(coerce_parameters(off) | coerce_parameters(before))
    assert all(getattr(params, name) is not None for name in names)


def test_a_guide_counts_beside_a_spelling_that_asks_for_none():
    given = {"response_format": {"type": "text"}, "guided_regex": "a+"}
    assert SamplingParams.from_mapping(given).guided_decoding_guide == "a+"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_logprobs": 3}, "top_logprobs: 0 unless logprobs is true, got 3"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs: 0 unless logprobs is true, got 3"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: an integer >= 0 and <= 20, got 21"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs: an integer >= 0 and <= 20, got -1"),
        ({"logprobs": 3, "top_logprobs": 3}, "logprobs: true or false beside top_logprobs, got 3"),
    ],
)
def test_a_switch_and_a_count_that_do_not_fit_are_refused(given, message):
    with pytest.raises(InvalidArgument) as caught:
        coerce_parameters(given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": "false"}, 0.0),
        ({"do_sample": False, "temperature": 0}, 0.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": None}, None),
    ],
)
def test_do_sample_false_is_greedy(given, expected):
    assert SamplingParams.from_mapping(given).temperature == expected


@pytest.mark.parametrize(
    "given", [{"do_sample": True}, {"do_sample": True, "temperature": 0}, {"do_sample": False, "temperature": 0.7}]
)
def test_do_sample_against_the_temperature_is_refused(given):
    with pytest.raises(InvalidArgument, match=r"^do_sample: false \(greedy\), or true beside a temperature above 0"):
        SamplingParams.from_mapping(given)


@pytest.mark.parametrize(("other", "is_fine"), [({"temperature": 0.7}, True), ({"temperature": 0}, False), ({}, False)])
def test_the_temperature_beside_do_sample_may_come_from_another_source(other, is_fine):
    for first, second in (({"do_sample": True}, other), (other, {"do_sample": True})):
        merged = coerce_parameters(first) | coerce_parameters(second)
        if is_fine:
            assert split_parameters(merged)[0] == SamplingParams(temperature=0.7)
            continue
        with pytest.raises(InvalidArgument, match=r"^do_sample: false \(greedy\), or true .*, got True"):
            split_parameters(merged)


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_feature_of_others_is_taken_at_the_value_that_changes_nothing(name):
    neutral = NEUTRAL[name]
    for value in neutral:
        assert coerce_parameters({name: value}) == coerce_parameters({name: str(value).lower()}) == {}
    assert coerce_parameters({name: None}) == {}
    with pytest.raises(Unsupported, match=f"^{name}: only "):
        coerce_parameters({name: not neutral[0] if isinstance(neutral[0], bool) else 3})
    with pytest.raises(InvalidArgument, match=f"^{name}: "):
        coerce_parameters({name: "nan"})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_honoured_is_refused_with_the_reason(name):
    with pytest.raises(Unsupported, match=f"^{name}: not taken; .*, got 5$"):
        coerce_parameters({name: 5})
    assert coerce_parameters({name: None}) == {}


def test_fields_without_effect_on_any_text_are_passed_over():
    assert coerce_parameters({"user": "me", "metadata": {"a": 1}, "store": False, "pad_id": 0, "use_cache": True}) == {}
