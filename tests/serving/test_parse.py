"""From tensors, JSON and request parameters to values."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar.runtime.params import FIELDS, ResponseParams
from mstar.serving import contract
from mstar.serving.parse import ParsedRequest, RawRequest, parse
from mstar.utils.errors import InvalidArgument, MstarError


def text(*values: str | bytes) -> np.ndarray:
    return np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)


def ask(parameters: dict | None = None, options: dict | str | None = None, **tensors: np.ndarray) -> ParsedRequest:
    if options is not None:
        tensors["sampling_parameters"] = text(options if isinstance(options, str) else json.dumps(options))
    return parse(RawRequest(tensors, json.dumps(parameters or {})))


def test_text_alone_takes_every_default():
    asked = ask(text_input=text("Hello"))
    assert asked.text == "Hello"
    assert asked.input_ids is None
    assert asked.messages is None
    assert asked.response == ResponseParams()
    assert not asked.include_prompt
    assert asked.params.max_tokens is None


def test_tensor_goes_before_json_and_json_before_parameter():
    tensor = np.array([1], np.int32)
    assert ask({"max_tokens": 3}, {"max_tokens": 2}, max_tokens=tensor).params.max_tokens == 1
    assert ask({"max_tokens": 3}, {"max_tokens": 2}).params.max_tokens == 2
    assert ask({"max_tokens": 3}).params.max_tokens == 3


def test_precedence_holds_across_aliases():
    assert ask({"random_seed": 5}, {"seed": 6}).params.seed == 6
    assert ask(options={"stop": "a"}, stop_words=text("b")).params.stop == ("b",)


def test_what_one_source_says_of_another_counts():
    tensor = np.array([0.5], np.float32)
    assert ask({"do_sample": True}, temperature=tensor).params.temperature == 0.5
    assert ask(options={"do_sample": True}, parameters={"temperature": 0.5}).params.temperature == 0.5
    with pytest.raises(InvalidArgument, match=r"^do_sample: "):
        ask({"do_sample": True})


def test_null_in_json_leaves_the_parameter_standing():
    assert ask({"top_k": 7}, {"top_k": None}).params.top_k == 7


@pytest.mark.parametrize(
    "source",
    [
        {
            "parameters": {
                "max_tokens": "128",
                "temperature": "0.7",
                "stream": "true",
                "ignore_eos": True,
                "top_k": "40",
            }
        },
        {"options": {"max_tokens": 128, "temperature": 0.7, "stream": True, "ignore_eos": "true", "top_k": 40.0}},
        {"options": {"max_tokens": "128", "temperature": "7e-1", "stream": "True", "ignore_eos": "true", "top_k": 40}},
        {
            "max_tokens": np.array([128], np.int32),
            "temperature": np.array([0.7], np.float32),
            "stream": np.array([True]),
            "ignore_eos": np.array([True]),
            "top_k": np.array([40], np.int32),
        },
    ],
)
def test_all_forms_of_a_value_agree(source):
    asked = ask(**source)
    assert asked.params.max_tokens == 128
    assert asked.params.temperature == pytest.approx(0.7)
    assert asked.params.top_k == 40
    assert asked.params.ignore_eos
    assert asked.response.stream


EXAMPLES = {
    "n": 2,
    "penalize_prompt": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "exclude_input_in_output": False,
    "top_p_min_keep": 3,
    "top_p": 0.5,
    "stop_token_ids": [1, 2],
    "guided_decoding_guide_type": "regex",
    "guided_decoding_guide": "[ab]+",
}
NEEDS = {
    "guided_decoding_guide_type": {"guided_decoding_guide": "x"},
    "guided_decoding_guide": {"guided_decoding_guide_type": "regex"},
}


@pytest.mark.parametrize("tensor", contract.OPTIONS, ids=lambda tensor: tensor.name)
def test_every_option_may_come_as_tensor_in_json_or_as_parameter(tensor):
    value = EXAMPLES.get(tensor.name, {"BOOL": True, "STRING": "end"}.get(tensor.dtype, 1))
    items = value if isinstance(value, list) else [value]
    sent = text(*items) if tensor.dtype == "STRING" else np.array(items, tensor.numpy_type)
    beside = NEEDS.get(tensor.name, {})
    asked = ask(options=beside, **{tensor.name: sent})
    assert asked != ask(), "the example is the default"
    spelt = ",".join(map(str, items))
    assert ask(options={**beside, tensor.name: value}) == asked
    assert ask({**beside, tensor.name: spelt}) == ask(options={**beside, tensor.name: spelt}) == asked
    assert isinstance(value, list) or ask({**beside, tensor.name: value}) == asked


@pytest.mark.parametrize(("name", "value"), [("logit_bias", {"5": -1.5, "7": 100}), ("allowed_token_ids", [1, 2, 3])])
def test_what_has_no_tensor_comes_in_json(name, value):
    assert name in contract.JSON_ONLY
    asked = ask(options={name: value})
    assert getattr(asked.params, name)
    assert ask({"sampling_parameters": json.dumps({name: value})}) == asked


def test_every_parameter_has_a_tensor_or_comes_in_json_only():
    tensors = {"stop" if tensor.name == "stop_words" else tensor.name for tensor in contract.OPTIONS}
    assert tensors | set(contract.JSON_ONLY) == set(FIELDS)
    assert not tensors & set(contract.JSON_ONLY)


def test_a_guide_may_be_an_object_in_json():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": schema}
    asked = ask(options=given)
    assert json.loads(asked.params.guided_decoding_guide) == schema
    assert ask(options={**given, "guided_decoding_guide": json.dumps(schema)}).params.guided_decoding_guide_type


def test_prompts_may_come_by_json_or_parameter():
    assert ask(options={"input_ids": [1, 2]}).input_ids == [1, 2]
    assert ask({"text_input": "Hi"}).text == "Hi"
    messages = [{"role": "user", "content": "Hi"}]
    assert ask(options={"messages": messages}).messages == messages


def test_sampling_parameters_may_be_a_request_parameter():
    assert ask({"sampling_parameters": '{"max_tokens": 4}'}).params.max_tokens == 4


def test_nul_and_the_text_after_it_survive():
    assert ask(text_input=text("a\0b")).text == "a\0b"


@pytest.mark.parametrize("prompt", [b"\xff\xfeabc", b"\xc3"])
def test_invalid_utf8_is_refused_by_name(prompt):
    with pytest.raises(InvalidArgument, match="text_input: valid UTF-8"):
        ask(text_input=text(prompt))


@pytest.mark.parametrize(
    "options",
    ['{"temperature":', "[]", '"x"', "nonsense", "", "[" * 1_000_000, '{"a":' * 100_000, "1" * 5000, "null"],
    ids=lambda value: value[:12],
)
def test_sampling_parameters_that_are_no_json_object_are_refused(options):
    with pytest.raises(InvalidArgument, match="sampling_parameters: a JSON object"):
        ask(options=options)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"nan"', '"1e999"', "1e999", "-1", '"hot"', "true"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_numbers_out_of_range_are_refused_by_field(field, value):
    with pytest.raises(InvalidArgument, match=f"^{field}: ") as caught:
        ask(options=f'{{"{field}": {value}}}')
    json.loads(json.dumps({"error": str(caught.value)}))


FLOATS = [tensor.name for tensor in contract.OPTIONS if tensor.dtype == "FP32"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -2.5])
@pytest.mark.parametrize("field", FLOATS)
def test_tensor_values_out_of_range_are_refused_by_field(field, value):
    with pytest.raises(InvalidArgument, match=f"^{field}: "):
        ask(**{field: np.array([value], np.float32)})


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"nan"', '"1e999"', "1e999", "-3"])
@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_penalties_out_of_range_are_refused_by_field(field, value):
    with pytest.raises(InvalidArgument, match=f"^{field}: "):
        ask(options=f'{{"{field}": {value}}}')


@pytest.mark.parametrize("value", [-2, 21, 49152, 10**6])
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_are_told_are_refused(field, value):
    with pytest.raises(InvalidArgument, match=rf"^{field}: .*20"):
        ask(**{field: np.array([value], np.int32)})


@pytest.mark.parametrize("source", ["parameters", "options"])
def test_unknown_names_are_refused(source):
    with pytest.raises(InvalidArgument, match=r"^max_token: .*max_tokens"):
        ask(**{source: {"max_token": 3}})


def test_what_the_server_adds_to_parameters_is_no_unknown_name():
    ask({"id": "7", "triton_enable_empty_final_response": True, "x-request-id": "a", "traceparent": "00-1"})


@pytest.mark.parametrize(
    "name", ["max-tokens", "text-input", "max-new-tokens", "guided-json", "num-beams", "lora-name"]
)
def test_a_misspelt_name_is_not_taken_for_a_header(name):
    with pytest.raises(InvalidArgument, match=f"^{name}: "):
        ask({name: 3})


def test_a_key_given_twice_is_refused():
    with pytest.raises(InvalidArgument, match="each key once"):
        ask(options='{"top_k": 1, "top_k": 2}')
    with pytest.raises(InvalidArgument, match="each key once, got '5'"):
        ask(options='{"logit_bias": {"5": 1, "5": 2}}')
    with pytest.raises(InvalidArgument, match="given once"):
        ask(options={"seed": 1, "random_seed": 2})


@pytest.mark.parametrize("shape", [(2,), (0,), (1, 2), (2, 1)])
def test_a_scalar_with_other_than_one_element_is_refused(shape):
    with pytest.raises(InvalidArgument, match=r"^max_tokens: one element, shape \[1\], got 'shape \["):
        ask(max_tokens=np.ones(shape, np.int32))


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float32, np.bool_])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(InvalidArgument, match=r"^max_tokens: dtype INT32"):
        ask(max_tokens=np.ones(1, dtype))


def test_ids_of_two_dimensions_are_refused():
    with pytest.raises(InvalidArgument, match=r"^input_ids: shape \[n\]"):
        ask(input_ids=np.ones((2, 2), np.int32))


def test_prompt_in_the_output_is_refused_when_streaming():
    assert ask(options={"exclude_input_in_output": False}).include_prompt
    with pytest.raises(InvalidArgument, match=r"^exclude_input_in_output: "):
        ask(options={"exclude_input_in_output": False, "stream": True})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(["max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "stream", "text_input", "odd"])


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw takes long on a busy machine
@given(st.dictionaries(KEYS, JSON_VALUES), st.dictionaries(KEYS, JSON_VALUES))
def test_any_json_parses_or_is_an_invalid_argument(parameters, options):
    with suppress(InvalidArgument):
        ask(parameters, options)


@given(st.binary(max_size=40))
def test_any_bytes_as_options_parse_or_are_an_invalid_argument(data):
    with suppress(InvalidArgument):
        parse(RawRequest({"sampling_parameters": text(data)}))


@pytest.mark.parametrize(("name", "hint"), [("priority", "request_priority"), ("timeout", "timeout_ms")])
def test_settings_of_the_server_that_have_no_effect_are_refused(name, hint):
    with pytest.raises(InvalidArgument, match=f"^{name}: not taken, .*{hint}.*, got 5"):
        ask({name: 5})
    with pytest.raises(MstarError, match=f"^{name}: (not taken; request_priority|a known parameter)"):
        ask(options={name: 5})


@pytest.mark.parametrize("way", ["parameters", "options", "tensors"])
def test_who_goes_first_comes_by_any_way(way):
    asked = {"request_priority": -7, "tenant": "Ærø", "cache_salt": "s", "no_cache": True}
    if way == "tensors":
        params = ask(
            request_priority=np.array([-7], np.int32),
            tenant=text("Ærø"),
            cache_salt=text(b"s"),
            no_cache=np.array([True]),
        ).params
    else:
        params = ask(**{way: asked}).params
    assert {name: getattr(params, name) for name in asked} == asked
