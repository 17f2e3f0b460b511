"""Per-request parameters, from any spelling a client uses."""

import copy
import json
import pickle
import subprocess
import sys

import msgspec
import numpy as np
import pytest

import mstar.runtime.params
from mstar.conductor.request import MAX_LOGPROBS
from mstar.model.text_sampling import MAX_REPETITION_WINDOW
from mstar.runtime.params import (
    FIELDS,
    PARAMETERS,
    RESPONSE_PARAMETERS,
    SAMPLING_PARAMETERS,
    ResponseParams,
    SamplingParams,
    coerce_parameters,
    parse_parameters,
    split_parameters,
)
from mstar.runtime.spellings import respell
from mstar.utils.errors import InvalidArgument

NOT_FINITE = [float("nan"), float("inf"), float("-inf"), "nan", "NaN", "Infinity", "1e999", "-1e999"]
NO_NUMBERS = [True, False, "", "x", [1], {}, b"1"]
NO_COUNTS = [*NOT_FINITE, *NO_NUMBERS, 1.5, "1.5"]
NO_BOOLS = [0, 1, "1", "yes", 1.0, [True]]

# parameter: what is taken and becomes itself, what is refused, in whatever form it comes
CONTRACT = {
    "max_tokens": ([0, 1, 2**40, 2**63 - 1], [*NO_COUNTS, -1, 2**63]),
    "min_tokens": ([0, 1, 2**40], [*NO_COUNTS, -1, 2**63]),
    "temperature": ([0, 1e-12, 5e-324, 0.7, 2.0001, 100, 1e30], [*NOT_FINITE, *NO_NUMBERS, -1, -1e-9, 1e39]),
    "top_k": ([-1, 0, 1, 40, 2**31, 2**63 - 1], [*NO_COUNTS, -2, 2**63]),
    "top_p": ([1e-9, 0.0001, 1], [*NOT_FINITE, *NO_NUMBERS, 0, -0.1, 1.0001, 2]),
    "min_p": ([0, 0.05, 1], [*NOT_FINITE, *NO_NUMBERS, -0.1, 1.0001]),
    "repetition_penalty": ([1e-3, 1, 1.3, 1e30], [*NOT_FINITE, *NO_NUMBERS, 0, -1, 1e39]),
    "presence_penalty": ([-2, 0, 0.5, 2], [*NOT_FINITE, *NO_NUMBERS, -2.0001, 2.0001]),
    "frequency_penalty": ([-2, 0, 0.5, 2], [*NOT_FINITE, *NO_NUMBERS, -2.0001, 2.0001]),
    "repetition_window": ([0, 64, 1024], [*NO_COUNTS, -1, 1025, 2**31]),
    "penalize_prompt": ([True, False], NO_BOOLS),
    "top_p_first": ([True, False], NO_BOOLS),
    "top_p_min_keep": ([1, 5], [*NO_COUNTS, 0, 2**31]),
    "seed": ([0, 7, 2**63 - 1], [*NO_COUNTS, -2, -(2**63), -(2**63) - 1, 2**63, 2**64 - 1, 2**64]),
    "n": ([1, 2, 16], [*NO_COUNTS, 0, -1, 2**31]),
    "ignore_eos": ([True, False], NO_BOOLS),
    "stop": ([("a",), ("a", "b")], [3, [""], ["a", 3], ["x" * 1025], [str(i) for i in range(65)], {"a": 1}]),
    "stop_token_ids": ([(0,), (5, 7)], [[-1], [2**31], ["x"], [1.5], [True], list(range(65)), {"a": 1}, True]),
    "include_stop_str_in_output": ([True, False], NO_BOOLS),
    "bad_words": ([("a",), (" b", "c")], [3, [""], ["a", 3], [str(i) for i in range(257)]]),
    "allowed_token_ids": ([(0,), (5, 7)], [[], [-1], [2**31], ["x"], [1.5]]),
    "logit_bias": (
        [{5: 1.0}, {5: -100.0, 6: 100.0}],
        [5, "x", "[]", [[5, 1]], {-1: 1}, {2**31: 1}, {"x": 1}, {1.5: 1}, {True: 1}, {5: True}, {5: None},
         dict.fromkeys(range(1025), 1), *({5: value} for value in NOT_FINITE)],
    ),
    "logprobs": ([0, 1, MAX_LOGPROBS], [-2, -1, 21, 49152, 49153, 10**6, 1.5, "x", [1]]),
    "prompt_logprobs": ([0, 1, MAX_LOGPROBS], [-2, -1, 21, 49152, 49153, 10**6, 1.5, "x", True]),
    "timeout_ms": ([0, 1, 600_000], [*NO_COUNTS, -1, 2**31]),
    "request_priority": ([-100, 0, 7, 100], [*NO_COUNTS, -101, 101, 2**31]),
    "tenant": (["", "acme", "x" * 256], [3, True, 1.5, ["a"], {"a": 1}, b"a", "x" * 257]),
    "cache_salt": (["", "acme", "x" * 256], [3, True, 1.5, ["a"], {"a": 1}, b"a", "x" * 257]),
    "no_cache": ([True, False], NO_BOOLS),
    "skip_special_tokens": ([True, False], NO_BOOLS),
    "spaces_between_special_tokens": ([True, False], NO_BOOLS),
    "stream": ([True, False], NO_BOOLS),
    "return_token_ids": ([True, False], NO_BOOLS),
    "exclude_input_in_output": ([True, False], NO_BOOLS),
    "return_log_probs": ([True, False], NO_BOOLS),
    "return_cumulative_logprob": ([True, False], NO_BOOLS),
}  # fmt: skip


def forms(value):
    """The ways one value may come: as it is, as NumPy has it, as text."""
    if isinstance(value, bool):
        return [value, np.bool_(value), str(value), str(value).lower()]
    if isinstance(value, int):
        whole = [float(value)] if abs(value) < 2**53 else []
        return [value, np.int64(value), str(value), f" {value} ", *whole]
    if isinstance(value, float):
        return [value, np.float64(value), repr(value)]
    if isinstance(value, dict):
        return [value, {str(key): str(item) for key, item in value.items()}, json.dumps(value)]
    if isinstance(value, str):
        return [value]
    texts = [",".join(map(str, value))] if isinstance(value[0], int) else []
    return [value, list(value), np.array(value, object), *texts, *(value if len(value) == 1 else ())]


def test_the_contract_above_is_whole():
    assert set(CONTRACT) == set(FIELDS) - {"guided_decoding_guide_type", "guided_decoding_guide"}


@pytest.mark.parametrize("name", CONTRACT)
def test_every_form_of_a_value_is_the_same_value(name):
    for value in CONTRACT[name][0]:
        for form in forms(value):
            result = coerce_parameters({name: form})[name]
            assert result == value, (form, result)
            assert type(result) is not type(np.int64(1))


@pytest.mark.parametrize("name", CONTRACT)
def test_a_value_outside_is_refused_by_the_name_and_the_range(name):
    for value in CONTRACT[name][1]:
        with pytest.raises(InvalidArgument) as caught:
            coerce_parameters({name: value})
        message = str(caught.value)
        assert message.startswith(f"{name}: "), message
        assert FIELDS[name].allowed in message or "once" in message
        assert ", got " in message
        assert caught.value.field == name
        # Fit for a JSON answer, however odd the value was.
        assert json.loads(json.dumps({"error": message}, allow_nan=False))["error"].isascii()
        assert len(message) < 700


def test_names_and_aliases_are_unique():
    names = [name for field in PARAMETERS for name in (field.name, *field.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("struct", "table"), [(SamplingParams, SAMPLING_PARAMETERS), (ResponseParams, RESPONSE_PARAMETERS)]
)
def test_the_structs_have_the_tables_rows_and_defaults(struct, table):
    assert struct.__struct_fields__ == tuple(field.name for field in table)
    params = struct()
    for field in table:
        assert getattr(params, field.name) == field.default


def test_every_alias_means_its_parameter():
    for field in PARAMETERS:
        for alias in field.aliases:
            value = {"bool": True, "strings": "x"}.get(field.kind, 1)
            assert coerce_parameters({alias: value}) == coerce_parameters({field.name: value})


def test_names_of_other_engines_are_aliases():
    trtllm = {
        "request_output_len": "5", "min_length": 2, "runtime_top_k": 3.0, "runtime_top_p": "0.5", "random_seed": "9",
        "num_return_sequences": 2, "stop_words": ["x"], "streaming": "true",
        "sampling_param_exclude_input_from_output": "false",
    }  # fmt: skip
    params, response = parse_parameters(trtllm)
    assert params == SamplingParams(max_tokens=5, min_tokens=2, top_k=3, top_p=0.5, seed=9, n=2, stop=("x",))
    assert (response.stream, response.exclude_input_in_output) == (True, False)
    transformers = {"max_new_tokens": 5, "min_new_tokens": 2, "stop_strings": "x"}
    assert SamplingParams.from_mapping(transformers) == SamplingParams(max_tokens=5, min_tokens=2, stop=("x",))
    assert SamplingParams.from_mapping({"max_completion_tokens": 5}) == SamplingParams(max_tokens=5)


@pytest.mark.parametrize("name", CONTRACT)
def test_the_constructor_checks_as_the_mapping_does(name):
    if name not in SamplingParams.__struct_fields__:
        return
    good, bad = CONTRACT[name]
    for value in good:
        if name != "seed":
            assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidArgument, match=f"^{name}: "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "same"),
    [({"max_new_tokens": 3}, {"max_tokens": 3}), ({"stop_words": ["a", "b"]}, {"stop": ("a", "b")}),
     ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}), ({"do_sample": False}, {"temperature": 0.0}),
     ({"guided_regex": "a+"}, {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}),
     ({"max_tokens": None, "max_new_tokens": 3}, {"max_tokens": 3}), ({"user": "me", "num_beams": 1}, {})],
)  # fmt: skip
def test_the_constructor_takes_what_a_mapping_may_say(given, same):
    assert SamplingParams(**given) == SamplingParams.from_mapping(given) == SamplingParams(**same)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"max_new_token": 3}, r"^max_new_token: a known parameter \(did you mean max_new_tokens\?\)"),
     ({"max_new_tokens": -3}, "^max_new_tokens: an integer >= 0"), ({"guided_json": "{"}, "^guided_json: "),
     ({"max_tokens": 3, "max_new_tokens": 3}, "^max_new_tokens: given once, not also as max_tokens"),
     ({"do_sample": True}, "^do_sample: "), ({"streaming": True}, "^streaming: no sampling parameter, LLM.stream ")],
)  # fmt: skip
def test_the_constructor_refuses_by_the_name_that_was_given(given, message):
    with pytest.raises(InvalidArgument, match=message):
        SamplingParams(**given)


@pytest.mark.parametrize("field", RESPONSE_PARAMETERS, ids=lambda field: field.name)
def test_the_constructor_refuses_what_concerns_the_response_alone(field):
    with pytest.raises(InvalidArgument, match=f"^{field.name}: no sampling parameter, .*, got False"):
        SamplingParams(**{field.name: False})


def test_params_are_values():
    params = SamplingParams(max_new_tokens=3, logit_bias={5: 1}, stop="a", seed=7)
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params
    assert eval(repr(params)) == params
    assert msgspec.structs.replace(params, top_k=3).top_k == 3
    assert SamplingParams(**msgspec.structs.asdict(SamplingParams())) == SamplingParams()
    with pytest.raises(AttributeError):
        params.seed = 8


def test_values_of_a_request_are_respelt_once(monkeypatch):
    given = []
    monkeypatch.setattr(mstar.runtime.params, "respell", lambda mapping: given.append(mapping) or respell(mapping))
    parse_parameters({"max_new_tokens": 3})
    assert given == [{"max_new_tokens": 3}]


def test_an_error_names_the_parameter_as_the_client_did():
    with pytest.raises(InvalidArgument, match=r"^request_output_len: an integer >= 0"):
        coerce_parameters({"request_output_len": -1})


@pytest.mark.parametrize("name", ["temperature", "top_k"])
def test_a_number_is_no_longer_than_numbers_are(name):
    assert coerce_parameters({name: "0" * 63 + "5"}) == {name: 5}
    with pytest.raises(InvalidArgument, match=f"^{name}: "):
        coerce_parameters({name: "0" * 64 + "5"})


def test_seed_minus_one_is_none():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams.from_mapping({"seed": "-1"}).seed is None


def test_minus_zero_is_zero():
    assert str(SamplingParams(temperature=-0.0).temperature) == "0.0"


def test_biases_are_cut_and_an_id_counts_once():
    assert SamplingParams(logit_bias={"5": 1e30, 6: "-101"}).logit_bias == {5: 100.0, 6: -100.0}
    with pytest.raises(InvalidArgument, match="logit_bias: each token id once"):
        SamplingParams(logit_bias={"5": 1, 5: 2})
    with pytest.raises(InvalidArgument, match="logit_bias: each token id once, got '5'"):
        SamplingParams(logit_bias='{"5": 1, "5": 2}')


@pytest.mark.parametrize("name", ["temprature", "logit_biases", "", "x" * 10_000, 'a"b\n', "\ud800", 5])
def test_an_unknown_name_is_refused_by_name(name):
    with pytest.raises(InvalidArgument, match="a known parameter") as caught:
        coerce_parameters({name: "a secret"})
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 600
    with pytest.raises(InvalidArgument, match="a known parameter"):
        coerce_parameters({name: None})


@pytest.mark.parametrize(("name", "near"), [("temprature", "temperature"), ("guided_jsn", "guided_json")])
def test_an_unknown_name_hints_at_the_nearest(name, near):
    with pytest.raises(InvalidArgument, match=rf"did you mean {near}\?"):
        coerce_parameters({name: 1})


def test_one_parameter_under_two_names_is_refused():
    with pytest.raises(InvalidArgument, match="request_output_len: given once, not also as max_tokens"):
        coerce_parameters({"max_tokens": 3, "request_output_len": 3})


def test_null_is_absent():
    assert coerce_parameters(dict.fromkeys(FIELDS)) == {}


def test_sources_merge_with_the_last_winning():
    merged = coerce_parameters({"max_tokens": 1, "seed": 4}) | coerce_parameters({"request_output_len": "2"})
    params, _ = split_parameters(merged)
    assert (params.max_tokens, params.seed) == (2, 4)


def test_the_class_documents_every_parameter_with_its_range_and_its_other_names():
    text = " ".join(SamplingParams.__doc__.split())
    for field in SAMPLING_PARAMETERS:
        assert f"{field.name}: {' '.join(field.doc.split())}" in text
        assert f"({field.allowed}{', in ' + field.unit if field.unit else ''}; default " in text
        assert all(alias in text for alias in field.aliases)


def test_the_longest_window_is_the_one_that_models_have_room_for():
    assert FIELDS["repetition_window"].high == MAX_REPETITION_WINDOW


def test_the_package_gives_the_class_without_torch():
    code = "import sys, mstar; print(mstar.SamplingParams(n=2).n); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "2\n"
