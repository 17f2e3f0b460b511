"""Generation control on the wire, with an engine that repeats the prompt: every answer is known beforehand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from serving_client import Answer, GrpcStream, ask, ask_many, events, post

pytestmark = [pytest.mark.server, pytest.mark.model]

WORDS = "one two three four five"  # five tokens
SAMPLED = {"temperature": 1.0}  # several sequences are not greedy


def ids_of(server: Any, text: str) -> list[int]:
    return ask(server, "echo", text_input=text, return_token_ids=True).token_ids


# Stop rules


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_id_ends_the_text_and_is_its_reason(echo_server, stream, include):
    ids = ids_of(echo_server, WORDS)
    options = {"stream": stream, "return_token_ids": True, "include_stop_str_in_output": include}
    answer = ask(echo_server, "echo", text_input=WORDS, stop_token_ids=[5, ids[2]], **options)
    assert answer.text == ("one two three" if include else "one two")
    assert answer.token_ids == ids[: 3 if include else 2]
    assert answer.usage == len(answer.token_ids)
    assert answer.finish_reason == "stop"
    assert answer.joined("stop_reason") == [str(ids[2])]


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_is_its_reason_and_may_be_kept(echo_server, stream):
    for include, text in ((False, "one two th"), (True, "one two three f")):
        answer = ask(
            echo_server, "echo", text_input=WORDS, stop_words=["zzz", "ree f"], stream=stream,
            include_stop_str_in_output=include,
        )  # fmt: skip
        assert answer.text == text
        assert answer.joined("stop_reason") == ["ree f"]


def test_an_end_by_itself_has_no_reason(echo_server):
    first = {"request_priority": -5, "tenant": "a", "cache_salt": "s", "no_cache": True}
    for values in ({}, {"max_tokens": 2}, {"timeout_ms": 60000}, first):
        answer = ask(echo_server, "echo", text_input=WORDS, **values)
        assert answer.finish_reasons
        assert answer.joined("stop_reason") == []


def test_min_tokens_holds_off_stop_ids_and_stop_strings(echo_server):
    again = " ".join([WORDS] * 2)
    ids = ids_of(echo_server, again)
    by_id = ask(echo_server, "echo", text_input=again, stop_token_ids=[ids[2]], min_tokens=3)
    by_string = ask(echo_server, "echo", text_input=again, stop_words=["three"], min_tokens=3)
    assert by_id.text == "one two three four five one two"
    assert by_string.text == by_id.text + " "


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_ends_with_what_there_is(echo_server, stream):
    text = "word " * 1000
    answer = ask(echo_server, "echo", text_input=text, timeout_ms=300, stream=stream)
    assert answer.error is None
    assert answer.finish_reason == "timeout"
    assert 0 < answer.usage < 1000
    assert text.startswith(answer.text)
    assert answer.finals.count(True) == 1


# Several sequences


def test_sequences_stream_under_their_index(echo_server):
    answer = ask(echo_server, "echo", text_input=WORDS, n=3, stream=True, **SAMPLED)
    assert answer.sequence_texts == [WORDS] * 3
    assert all(len(outputs["text_output"]) == 1 for outputs in answer.outputs)
    assert answer.usage == 3 * 5
    assert answer.finish_reasons == ["stop"] * 3
    assert answer.finals == [False] * (len(answer.finals) - 1) + [True]


def test_not_streaming_one_response_has_every_sequence(echo_server):
    ids = ids_of(echo_server, WORDS)
    asked = {"n": 3, "return_token_ids": True, "logprobs": 0, "return_log_probs": True}
    answer = ask(echo_server, "echo", text_input=WORDS, return_cumulative_logprob=True, **asked, **SAMPLED)
    (outputs,) = answer.outputs
    assert outputs["text_output"] == [WORDS] * 3
    assert outputs["sequence_index"] == [0, 1, 2]
    assert outputs["finish_reason"] == ["stop"] * 3
    assert outputs["num_output_tokens"] == [5] * 3
    assert outputs["output_ids"] == ids * 3
    assert outputs["output_log_probs"] == [-(place + 1) / 8 for place in range(5)] * 3
    assert outputs["cumulative_logprob"] == [-15 / 8] * 3
    assert [len(json.loads(told)) for told in outputs["logprobs"]] == [5] * 3


def test_sequences_over_http(echo_server):
    body = {"text_input": WORDS, "n": 2, "temperature": 1.0}
    status, text = post(echo_server, "echo", body)
    assert status == 200
    assert json.loads(text)["text_output"] == [WORDS] * 2
    status, text = post(echo_server, "echo", {**body, "stream": True}, stream=True)
    assert status == 200
    pieces = list(events(text))
    for index in range(2):
        assert "".join(p["text_output"] for p in pieces if p["sequence_index"] == index) == WORDS


def test_one_text_has_no_index(echo_server):
    assert ask(echo_server, "echo", text_input=WORDS, n=1).joined("sequence_index") == []


# Log-probabilities


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_stand_beside_their_tokens(echo_server, stream):
    ids = ids_of(echo_server, WORDS)
    answer = ask(echo_server, "echo", text_input=WORDS, logprobs=1, prompt_logprobs=0, stream=stream)
    told = [position for text in answer.joined("logprobs") for position in json.loads(text)]
    words = ["one", " two", " three", " four", " five"]
    assert told == [
        {str(token_id): {"logprob": -(place + 1) / 8, "rank": place + 1, "decoded_token": word}}
        for place, (token_id, word) in enumerate(zip(ids, words, strict=True))
    ]
    assert "prompt_logprobs" in answer.outputs[0]
    (prompt,) = answer.joined("prompt_logprobs")
    assert [None if position is None else [*position] for position in json.loads(prompt)] == [
        None,
        *([str(token_id)] for token_id in ids[1:]),
    ]


def test_logprobs_end_with_the_text(echo_server):
    for stream in (True, False):
        answer = ask(
            echo_server, "echo", text_input=WORDS, stop_words=["ree"], return_log_probs=True,
            return_cumulative_logprob=True, stream=stream,
        )  # fmt: skip
        assert answer.text == "one two th"
        assert answer.joined("output_log_probs") == [-1 / 8, -2 / 8, -3 / 8]
        assert answer.joined("cumulative_logprob")[-1] == -6 / 8


def test_only_who_asks_is_told(echo_server):
    requests = [{"text_input": f"{WORDS} {index}", "stream": index % 2 == 0} for index in range(12)]
    for request in requests[::3]:
        request["return_log_probs"] = True
    for request, answer in zip(requests, ask_many(echo_server, "echo", requests), strict=True):
        assert answer.text == request["text_input"]
        told = answer.joined("output_log_probs")
        assert told == ([-(place + 1) / 8 for place in range(answer.usage)] if "return_log_probs" in request else [])
        assert not answer.joined("logprobs")


# The same by every way

CONTROLS: list[tuple[str, Any]] = [
    ("stop_token_ids", [1, 2]),
    ("min_tokens", 2),
    ("n", 2),
    ("logprobs", 0),
    ("prompt_logprobs", 0),
    ("include_stop_str_in_output", True),
    ("return_log_probs", True),
]


@pytest.mark.parametrize(("name", "value"), CONTROLS)
def test_a_control_is_the_same_as_tensor_in_json_and_as_parameter(echo_server, name, value):
    spelt = ",".join(map(str, value)) if isinstance(value, list) else value
    ways: list[dict[str, Any]] = [
        {name: value},
        {"sampling_parameters": json.dumps({name: value})},
        {"sampling_parameters": json.dumps({name: str(spelt)})},
        {"parameters": {name: spelt}},
    ]
    with GrpcStream(echo_server, "echo") as stream:
        answers: list[Answer] = []
        for way in ways:
            parameters = way.pop("parameters", None)
            stream.send({"text_input": WORDS, "stop_words": ["four"], **SAMPLED, **way}, parameters=parameters)
            answers.append(stream.collect())
    assert not answers[0].error
    for answer in answers[1:]:
        assert answer.outputs == answers[0].outputs


GUIDES = [
    {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"type": "object"}'},
    {"sampling_parameters": '{"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z ]+"}'},
    {"sampling_parameters": '{"guided_json": {"type": "object"}}'},
    {"sampling_parameters": '{"response_format": {"type": "json_object"}}'},
    {"parameters": {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z ]+"}},
    {"sampling_parameters": '{"guided_choice": ["yes", "no"]}'},
]


@pytest.mark.parametrize("values", GUIDES, ids=str)
def test_a_guide_is_read_by_every_way(echo_server, values):
    assert ask(echo_server, "echo", text_input="ab", **values).text == "ab"


# Refusals

NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name in ("top_p", "min_p", "repetition_penalty") for value in (NAN, INF, -INF)),
    *(({name: value}, name) for name in ("presence_penalty", "frequency_penalty") for value in (NAN, -INF, 2.5)),
    *(
        ({"sampling_parameters": f'{{"{name}": {value}}}'}, name)
        for name in ("min_p", "repetition_penalty", "presence_penalty")
        for value in ("NaN", "-Infinity", '"nan"', '"1e999"')
    ),
    ({"stop_token_ids": [49152], "min_tokens": 1}, "stop_token_ids"),
    ({"stop_token_ids": [-1], "min_tokens": 1}, "stop_token_ids"),
    ({"sampling_parameters": '{"stop_token_ids": [2147483648]}'}, "stop_token_ids"),
    ({"sampling_parameters": '{"logit_bias": {"49152": 5}}'}, "logit_bias"),
    ({"sampling_parameters": '{"allowed_token_ids": [49152]}'}, "allowed_token_ids"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 49153}, "logprobs"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"n": 0}, "n"),
    ({"n": 17, "temperature": 1.0}, "n"),
    ({"n": 2, "temperature": 0.0}, "n"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"timeout_ms": -1}, "timeout_ms"),
    ({"request_priority": 101}, "request_priority"),
    ({"tenant": "x" * 257}, "tenant"),
    ({"sampling_parameters": '{"cache_salt": 5}'}, "cache_salt"),
    ({"top_p_min_keep": 0}, "top_p_min_keep"),
    ({"repetition_window": -1}, "repetition_window"),
    ({"bad_words": [""]}, "bad_words"),
    ({"guided_decoding_guide": "[ab]+"}, "guided_decoding_guide_type"),
    ({"guided_decoding_guide_type": "yaml", "guided_decoding_guide": "a"}, "guided_decoding_guide_type"),
    ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"}, "guided_decoding_guide"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["priority", "timeout"])
def test_a_setting_of_the_server_is_refused_where_it_reaches_the_model(echo_server, name):
    status, body = post(echo_server, "echo", {"text_input": "a", name: 5})
    assert (status, json.loads(body)["error"].partition(": ")[0]) == (400, name)
    with GrpcStream(echo_server, "echo") as stream:
        stream.send({"text_input": "a", "timeout_ms": 0}, **{name: 5})
        assert stream.collect().error is None


def test_what_is_out_of_range_is_refused_by_name_beside_a_neighbour_that_goes_on(echo_server):
    text = "word " * 700
    with GrpcStream(echo_server, "echo") as neighbour, GrpcStream(echo_server, "echo") as stream:
        neighbour.send({"text_input": text, "stream": True, "max_tokens": 4096})
        for values, field in REFUSED:
            stream.send({"text_input": "a", **values})
            answer = stream.collect()
            assert answer.error is not None, values
            assert f"{field}: " in answer.error, values
            json.loads(json.dumps({"error": answer.error}), parse_constant=pytest.fail)
            assert not answer.outputs
        assert neighbour.collect().text == text
    assert ask(echo_server, "echo", text_input="still here").text == "still here"


def test_a_refusal_over_http_is_a_400_with_the_field(echo_server):
    nan = {"sampling_parameters": '{"presence_penalty": "nan"}'}
    for values, field in (({"logprobs": 21}, "logprobs"), ({"n": 2, "temperature": 0}, "n"), (nan, "presence_penalty")):
        status, body = post(echo_server, "echo", {"text_input": "a", **values})
        assert status == 400, body
        assert f"{field}: " in json.loads(body)["error"]


def test_a_wrong_shape_is_refused(echo_server):
    for name, array in (("n", np.array([1, 2], np.int32)), ("stop_token_ids", np.array([[1]], np.int32))):
        answer = ask(echo_server, "echo", text_input="a", **{name: array})
        assert answer.error is not None
        assert name in answer.error
