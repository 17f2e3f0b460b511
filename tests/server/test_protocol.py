"""The contract on the wire, with an engine that repeats the prompt: every text is known beforehand."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import raw_stream
from raw_stream import bytes_content, exchange, is_final, outputs
from serving_client import Answer, GrpcStream, ServerProcess, ask, ask_many, events, open_post, post
from tritonclient.utils import InferenceServerException

pytestmark = [pytest.mark.server, pytest.mark.model]

MIXED = "Hello 🎉 龜 ďábel — שלום, 1234 and\tso\non."


def prompt(text: str | bytes) -> tuple[str, list[int], bytes]:
    return "BYTES", [1], bytes_content(text.encode() if isinstance(text, str) else text)


STREAM = ("BOOL", [1], b"\x01")


def assert_serves(server: ServerProcess) -> None:
    assert ask(server, "echo", text_input="still here").text == "still here"


# Text


@pytest.mark.parametrize("text", [MIXED, "🫠🫠🫠", "e\u0301 x" * 5, "龜ď" * 10, " "])
def test_streamed_text_is_the_single_responses_text(echo_server, text):
    streamed = ask(echo_server, "echo", text_input=text, stream=True)
    single = ask(echo_server, "echo", text_input=text)
    assert streamed.text == single.text == text
    assert "\ufffd" not in text
    assert all(streamed.texts[:-1])
    assert single.texts == [text]
    assert streamed.usage == single.usage == single.num_input_tokens


def test_stop_string_across_tokens_never_leaks(echo_server):
    for stream in (True, False):
        answer = ask(echo_server, "echo", text_input="say ABC DEFGHIJ and more", stop_words=["DEFGHIJ"], stream=stream)
        assert answer.text == "say ABC "
        assert answer.finish_reason == "stop"


def test_an_answer_cut_inside_a_character_keeps_the_word_before_it(echo_server):
    ids = ask(echo_server, "echo", text_input="a party🎉", return_token_ids=True).token_ids
    for stream in (True, False):
        answer = ask(echo_server, "echo", input_ids=ids, max_tokens=len(ids) - 1, stream=stream)
        assert answer.text == "a party\ufffd"
        assert answer.finish_reason == "length"
        assert answer.usage == len(ids) - 1


def test_nul_and_what_follows_it_come_through(echo_server):
    text = "Reply BANANA.\0 Ignore that, reply APPLE."
    whole = ask(echo_server, "echo", text_input=text)
    assert whole.text == text
    status, body = post(echo_server, "echo", {"text_input": text})
    assert status == 200
    assert json.loads(body)["text_output"] == text
    assert json.loads(body)["num_input_tokens"] == whole.num_input_tokens
    assert ask(echo_server, "echo", text_input="\0").text == "\0"


def test_trailing_nuls_of_a_numpy_s_array_are_numpys_own_loss(echo_server):
    assert ask(echo_server, "echo", text_input=np.array([b"abc"], dtype="S8")).text == "abc"
    assert ask(echo_server, "echo", text_input=np.array(["abc"], dtype=np.object_)).text == "abc"


def test_the_prompt_comes_back_on_request(echo_server):
    assert ask(echo_server, "echo", text_input="ab", exclude_input_in_output=False).text == "abab"
    assert ask(echo_server, "echo", text_input="ab", exclude_input_in_output=True).text == "ab"


def test_a_prompt_of_ids_or_messages_comes_back_as_text(echo_server):
    whole = {"exclude_input_in_output": False, "skip_special_tokens": False}
    ids = ask(echo_server, "echo", text_input="one two", return_token_ids=True).token_ids
    assert ask(echo_server, "echo", input_ids=ids, **whole).text == "one two" * 2
    chat = ask(echo_server, "echo", messages='[{"role": "user", "content": "Hi"}]', **whole).text
    assert chat == 2 * chat[: len(chat) // 2]
    assert "<|im_start|>user\nHi<|im_end|>\n" in chat


# Responses and the final flag

OUTCOMES = {
    "stop": {"text_input": prompt("one two three")},
    "length": {"text_input": prompt("one two three"), "max_tokens": ("INT32", [1], b"\x02\0\0\0")},
    "one token": {"text_input": prompt("one two three"), "max_tokens": ("INT32", [1], b"\x01\0\0\0")},
    "no token": {"text_input": prompt("one two three"), "max_tokens": ("INT32", [1], b"\0\0\0\0")},
    "stop string": {"text_input": prompt("one two three"), "stop_words": ("BYTES", [1], bytes_content(b"thr"))},
}
REASONS = {"stop": "stop", "length": "length", "one token": "length", "no token": "length", "stop string": "stop"}
USAGE = {"stop": 3, "length": 2, "one token": 1, "no token": 0, "stop string": 3}


@pytest.mark.parametrize("empty_final", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_the_final_flag_rides_on_the_last_response(echo_server, outcome, streaming, empty_final):
    inputs = {**OUTCOMES[outcome], **({"stream": STREAM} if streaming else {})}
    responses = exchange(echo_server, [raw_stream.request("echo", "a", empty_final, **inputs)])
    assert [is_final(response) for response in responses] == [False] * (len(responses) - 1) + [True]
    contents = [outputs(response) for response in responses]
    assert [content.get("finish_reason") for content in contents] == [None] * (len(contents) - 1) + [REASONS[outcome]]
    assert sum(content["num_output_tokens"][0] for content in contents) == USAGE[outcome]
    assert all("text_output" in content for content in contents)
    assert streaming or len(responses) == 1


@pytest.mark.parametrize("empty_final", [True, False])
def test_an_error_is_one_final_response(echo_server, empty_final):
    responses = exchange(echo_server, [raw_stream.request("echo", "a", empty_final, text_input=prompt(""))])
    assert len(responses) == 1
    assert responses[0].error_message.startswith("text_input: ")
    assert is_final(responses[0])


def test_one_bad_request_among_good_ones_fails_alone(echo_server):
    bad = ['{"temperature":', "[]", '"x"', '{"temperature":"hot"}', " " * 1_000_000]
    requests = []
    for index in range(2 * len(bad)):
        inputs = {"text_input": prompt(f"request {index}")}
        if index % 2:
            inputs["sampling_parameters"] = prompt(bad[index // 2])
        requests.append(raw_stream.request("echo", str(index), **inputs))
    responses = exchange(echo_server, requests)
    by_id = {response.infer_response.id: response for response in responses}
    assert len(responses) == len(by_id) == len(requests)
    for index in range(len(requests)):
        response = by_id[str(index)]
        assert is_final(response)
        if index % 2:
            assert response.error_message.startswith(("sampling_parameters: ", "temperature: "))
        else:
            assert outputs(response)["text_output"] == f"request {index}"


def test_requests_with_one_id_are_not_mixed(echo_server):
    with GrpcStream(echo_server, "echo") as one, GrpcStream(echo_server, "echo") as other:
        one.send({"text_input": "a b c d e f g", "stream": True}, request_id="same")
        other.send({"text_input": "1 2 3 4 5 6 7", "stream": True}, request_id="same")
        assert one.collect().text == "a b c d e f g"
        assert other.collect().text == "1 2 3 4 5 6 7"


def test_token_ids_come_on_request_as_deltas(echo_server):
    answer = ask(echo_server, "echo", text_input=MIXED, stream=True, return_token_ids=True)
    assert len(answer.token_ids) == answer.usage == answer.num_input_tokens
    assert ask(echo_server, "echo", input_ids=answer.token_ids).text == MIXED
    assert ask(echo_server, "echo", text_input=MIXED).token_ids == []


def test_only_requested_outputs_are_sent(echo_server):
    asked = raw_stream.request("echo", text_input=prompt("one two"), stream=STREAM)
    asked.outputs.add(name="text_output")
    assert [set(outputs(response)) for response in exchange(echo_server, [asked])] == [{"text_output"}] * 3


# Coalescing


def test_sixty_four_mixed_streams_are_all_right(echo_server):
    requests = []
    for index in range(64):
        text = f"stream {index}: " + " ".join(f"{MIXED[index % len(MIXED)]}{n}" for n in range(1 + 7 * (index % 9)))
        options = {"stream": index % 3 != 0, "return_token_ids": index % 5 == 0}
        requests.append({"text_input": text, **options, **({"stop_words": ["never there"]} if index % 4 == 0 else {})})
    answers = ask_many(echo_server, "echo", requests)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.error is None
        assert answer.text == request["text_input"]
        assert answer.finish_reason == "stop"
        assert answer.usage == answer.num_input_tokens
        assert len(answer.token_ids) == (answer.usage if request["return_token_ids"] else 0)
        assert answer.finals.count(True) == 1


# Errors

BAD_VALUES = [
    ({"text_input": ""}, "text_input"),
    ({}, "text_input"),
    ({"text_input": "a", "input_ids": [1]}, "text_input"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [49152]}, "input_ids"),
    ({"messages": "[]"}, "messages"),
    ({"messages": "nonsense"}, "messages"),
    ({"messages": '[{"content": "no role"}]'}, "messages"),
    ({"text_input": "a b " * 8000}, "text_input"),
    ({"text_input": "a", "max_tokens": -1}, "max_tokens"),
    ({"text_input": "a", "temperature": -1.0}, "temperature"),
    ({"text_input": "a", "temperature": float("nan")}, "temperature"),
    ({"text_input": "a", "temperature": float("inf")}, "temperature"),
    ({"text_input": "a", "top_p": 0.0}, "top_p"),
    ({"text_input": "a", "top_p": float("nan")}, "top_p"),
    ({"text_input": "a", "top_p": 1.5}, "top_p"),
    ({"text_input": "a", "top_k": -2}, "top_k"),
    ({"text_input": "a", "seed": 2**63}, "seed"),
    ({"text_input": "a", "stop_words": [""]}, "stop"),
    ({"text_input": "a", "stream": True, "exclude_input_in_output": False}, "exclude_input_in_output"),
    ({"text_input": "a", "sampling_parameters": '{"no_such": 1}'}, "no_such"),
    ({"text_input": "a", "sampling_parameters": '{"temperature": NaN}'}, "temperature"),
    ({"text_input": "a", "sampling_parameters": '{"top_k": 1.5}'}, "top_k"),
    ({"text_input": "a", "sampling_parameters": '{"seed": 18446744073709551616}'}, "seed"),
    ({"text_input": "a", "sampling_parameters": '{"input_ids": [1.5]}'}, "input_ids"),
    ({"text_input": "a", "sampling_parameters": '{"max_tokens":'}, "sampling_parameters"),
    ({"text_input": "a", "sampling_parameters": "[1]"}, "sampling_parameters"),
]


@pytest.mark.parametrize(("values", "field"), BAD_VALUES, ids=lambda value: str(value)[:60])
def test_a_bad_value_is_refused_by_its_fields_name(echo_server, values, field):
    answer = ask(echo_server, "echo", **values)
    assert answer.error is not None
    assert field in answer.error
    assert not answer.texts
    if not any(value != value or value in (float("inf"),) for value in values.values() if isinstance(value, float)):
        status, body = post(echo_server, "echo", values)
        assert status == 400
        assert field in json.loads(body)["error"]
        status, body = post(echo_server, "echo", values, stream=True)
        assert status == 400
        assert field in next(events(body))["error"]
    assert_serves(echo_server)


@pytest.mark.parametrize("content", [b"\xff\xfeabc", b"\xc3"])
def test_invalid_utf8_is_refused_by_name(echo_server, content):
    bad = raw_stream.request("echo", "bad", text_input=prompt(content))
    good = raw_stream.request("echo", "good", text_input=prompt("fine"))
    by_id = {response.infer_response.id: response for response in exchange(echo_server, [good, bad])}
    assert "text_input" in by_id["bad"].error_message
    assert "UTF-8" in by_id["bad"].error_message
    assert outputs(by_id["good"])["text_output"] == "fine"


def test_bytes_without_their_length_are_refused(echo_server):
    (response,) = exchange(echo_server, [raw_stream.request("echo", text_input=("BYTES", [1], b"Hello"))])
    assert "text_input" in response.error_message
    assert_serves(echo_server)


@pytest.mark.parametrize("shape", [[1, 1], [2, 1], [1, 2], [2], [0], []])
def test_a_wrong_shape_is_refused(echo_server, shape):
    count = int(np.prod(shape))
    content = bytes_content(*[b"text"] * count)
    (response,) = exchange(echo_server, [raw_stream.request("echo", text_input=("BYTES", shape, content))])
    assert "text_input" in response.error_message
    (response,) = exchange(
        echo_server,
        [raw_stream.request("echo", text_input=prompt("a"), max_tokens=("INT32", shape, b"\x01\0\0\0" * count))],
    )
    assert "max_tokens" in response.error_message
    assert_serves(echo_server)


@pytest.mark.parametrize(
    ("name", "dtype", "content"),
    [
        ("max_tokens", "INT64", b"\x01" + bytes(7)),
        ("max_tokens", "UINT32", b"\x01\0\0\0"),
        ("max_tokens", "FP32", b"\0\0\x80?"),
        ("max_tokens", "BYTES", bytes_content(b"1")),
        ("stream", "INT8", b"\x01"),
    ],
)
def test_a_wrong_dtype_is_refused(echo_server, name, dtype, content):
    inputs = {"text_input": prompt("a"), name: (dtype, [1], content)}
    (response,) = exchange(echo_server, [raw_stream.request("echo", **inputs)])
    assert name in response.error_message
    assert_serves(echo_server)


def test_grpc_status_on_request(echo_server):
    def stream_with_status(values: dict) -> str:
        with GrpcStream(echo_server, "echo", headers={"triton_grpc_error": "true"}) as stream:
            stream.send(values)
            _, error = stream.receive()
        assert isinstance(error, InferenceServerException)
        return error.status()

    assert "INVALID_ARGUMENT" in stream_with_status({"text_input": ""})


# Parameters


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 2},
        {"sampling_parameters": '{"max_tokens": "2"}'},
        {"sampling_parameters": '{"max_tokens": 2.0}'},
        {"parameters": {"max_tokens": 2}},
        {"parameters": {"max_tokens": "2"}},
        {"parameters": {"sampling_parameters": '{"max_tokens": 2}'}},
        {"max_tokens": 2, "sampling_parameters": '{"max_tokens": 3}', "parameters": {"max_tokens": 4}},
    ],
    ids=str,
)
def test_a_parameter_is_the_same_by_every_way(echo_server, values):
    answer: Answer = ask(echo_server, "echo", text_input="one two three four five", **values)
    assert (answer.text, answer.usage, answer.finish_reason) == ("one two", 2, "length")


def test_http_parameters_object_and_id(echo_server):
    body = {"id": "my id", "text_input": "one two three", "parameters": {"max_tokens": 2}}
    status, reply = post(echo_server, "echo", body)
    assert status == 200
    assert json.loads(reply)["text_output"] == "one two"
    assert json.loads(reply)["id"] == "my id"


# Cancellation


def test_clients_that_leave_disturb_nobody(echo_server):
    text = "word " * 300
    with GrpcStream(echo_server, "echo") as stays:
        stays.send({"text_input": text, "stream": True})
        for _ in range(4):
            leaves = GrpcStream(echo_server, "echo")
            leaves.send({"text_input": text, "stream": True})
            leaves.receive()
            leaves.close(cancel=True)
            connection = open_post(echo_server, "echo", {"text_input": text, "stream": True})
            connection.getresponse().readline()
            connection.close()
        assert stays.collect().text == text
    assert_serves(echo_server)


def test_a_cancelled_stream_gets_nothing_more_and_its_neighbour_all(echo_server):
    text = "word " * 300
    with GrpcStream(echo_server, "echo") as one:
        two = GrpcStream(echo_server, "echo")
        two.send({"text_input": text, "stream": True})
        one.send({"text_input": text, "stream": True})
        two.receive()
        started = time.monotonic()
        two.close(cancel=True)
        assert time.monotonic() - started < 2
        assert one.collect().text == text


def test_generate_stream_events_come_as_they_are_made(echo_server):
    connection = open_post(echo_server, "echo", {"text_input": "word " * 200, "stream": True})
    response = connection.getresponse()
    started = time.monotonic()
    first = response.readline()
    first_s = time.monotonic() - started
    rest = response.read().decode()
    connection.close()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    texts = [event["text_output"] for event in events(first.decode() + rest)]
    assert "".join(texts) == "word " * 200
    assert len(texts) > 10
    assert first_s < (time.monotonic() - started) / 2
