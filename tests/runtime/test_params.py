"""Per-request parameters, from any spelling a client uses."""

import json

import numpy as np
import pytest

from mstar.runtime.params import (
    FIELDS,
    PARAMETERS,
    SAMPLING_PARAMETERS,
    SamplingParams,
    coerce_parameters,
    parse_parameters,
    split_parameters,
)
from mstar.utils.errors import InvalidArgument


def test_names_and_aliases_are_unique():
    names = [name for field in PARAMETERS for name in (field.name, *field.aliases)]
    assert len(names) == len(set(names))


def test_the_struct_has_the_tables_rows_and_defaults():
    assert SamplingParams.__struct_fields__ == tuple(field.name for field in SAMPLING_PARAMETERS)
    params = SamplingParams()
    for field in SAMPLING_PARAMETERS:
        assert getattr(params, field.name) == field.default


def test_every_alias_means_its_parameter():
    given = {
        "request_output_len": "5", "runtime_top_k": 3.0, "runtime_top_p": "0.5", "random_seed": "9",
        "stop_words": ["x"], "streaming": "true", "sampling_param_exclude_input_from_output": "false",
    }  # fmt: skip
    params, response = parse_parameters(given)
    assert params == SamplingParams(max_tokens=5, top_k=3, top_p=0.5, seed=9, stop=("x",))
    assert (response.stream, response.exclude_input_in_output) == (True, False)


@pytest.mark.parametrize("value", ["0.7", 0.7, np.float64(0.7)])
def test_the_forms_of_a_value_agree(value):
    assert SamplingParams.from_mapping({"temperature": value}).temperature == 0.7


@pytest.mark.parametrize("seed", [7, "7", 7.0, np.int64(7)])
def test_the_same_seed_in_any_numeric_form(seed):
    assert SamplingParams(seed=seed).seed == 7


@pytest.mark.parametrize("seed", [-(2**63), -(2**63) - 1, 2**63, 2**64 - 1, 2**64, True, 1.5, "x"])
def test_seeds_outside_63_bits_are_refused(seed):
    with pytest.raises(InvalidArgument, match="seed: "):
        SamplingParams.from_mapping({"seed": seed})


def test_seed_minus_one_is_none():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=2**63 - 1).seed == 2**63 - 1


@pytest.mark.parametrize(
    ("top_k", "expected"), [(-1, -1), (0, 0), (1, 1), ("40", 40), (None, None), (2**63 - 1, 2**63 - 1)]
)
def test_top_k_takes_off_in_all_its_spellings(top_k, expected):
    assert SamplingParams.from_mapping({"top_k": top_k}).top_k == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -2), ("top_k", 1.5), ("top_k", True), ("max_tokens", -1), ("temperature", -1e-9), ("temperature", -1),
     ("temperature", "nan"), ("temperature", float("inf")), ("temperature", "1e999"), ("temperature", 1e39),
     ("top_p", 0), ("top_p", 1.0001), ("top_p", -0.1), ("top_p", float("nan")), ("stop", [""]), ("stop_words", 3),
     ("ignore_eos", 1), ("stream", "maybe"), ("presence_penalty", 0.5), ("frequency_penalty", "nan")],
)  # fmt: skip
def test_a_bad_value_is_refused_under_the_clients_name(name, value):
    with pytest.raises(InvalidArgument) as caught:
        coerce_parameters({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert caught.value.field == name
    assert json.loads(json.dumps({"error": message}, allow_nan=False))["error"].isascii()


def test_minus_zero_and_neutral_values_are_fine():
    given = {"temperature": -0.0, "presence_penalty": 0, "frequency_penalty": "0", "user": "me", "metadata": {"a": 1}}
    assert str(SamplingParams.from_mapping(given).temperature) == "0.0"


@pytest.mark.parametrize("name", ["temprature", "logit_bias", "min_p", "", "x" * 10_000, 'a"b\n', "\ud800"])
def test_an_unknown_name_is_refused_by_name(name):
    with pytest.raises(InvalidArgument, match="a known parameter") as caught:
        coerce_parameters({name: "a secret"})
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_an_unknown_name_hints_at_the_nearest():
    with pytest.raises(InvalidArgument, match="did you mean temperature"):
        coerce_parameters({"temprature": 1})


def test_one_parameter_under_two_names_is_refused():
    with pytest.raises(InvalidArgument, match="request_output_len: given once, not also as max_tokens"):
        coerce_parameters({"max_tokens": 3, "request_output_len": 3})


def test_null_is_absent():
    assert coerce_parameters(dict.fromkeys(FIELDS)) == {}


def test_sources_merge_with_the_last_winning():
    merged = coerce_parameters({"max_tokens": 1, "seed": 4}) | coerce_parameters({"request_output_len": "2"})
    params, _ = split_parameters(merged)
    assert (params.max_tokens, params.seed) == (2, 4)
