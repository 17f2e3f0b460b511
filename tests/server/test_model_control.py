"""Generation control of the shipped model in a real server."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
from golden import CASES, MODEL, assert_golden, certain, greedy, wait_idle
from serving_client import GrpcStream, ask, ask_many, events, post

from mstar.model.front import open_front

pytestmark = [pytest.mark.server, pytest.mark.model]

CASE = next(case for case in CASES if certain(case) == 48)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = {"messages": json.dumps([{"role": "user", "content": "Describe a person as JSON."}])}
STORY = {"text_input": "Once upon a time", "temperature": 1.0, "max_tokens": 8}


# Structured output


@pytest.mark.parametrize("seed", [1, 2])
def test_a_schema_over_grpc_gives_what_it_describes(model_server, seed):
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)}
    answer = ask(model_server, MODEL, **ASK, **guide, stream=True, temperature=1.0, seed=seed, max_tokens=200)
    assert answer.error is None
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_a_schema_over_http_gives_what_it_describes(model_server):
    options = json.dumps({"guided_json": SCHEMA, "temperature": 0.8, "seed": 3, "max_tokens": 200})
    status, body = post(model_server, MODEL, {**ASK, "stream": True, "sampling_parameters": options}, stream=True)
    assert status == 200
    jsonschema.validate(json.loads("".join(event["text_output"] for event in events(body))), SCHEMA)


def test_a_choice_and_a_pattern_are_kept_to(model_server):
    choice = ask(model_server, MODEL, **ASK, sampling_parameters='{"guided_choice": ["yes", "no"], "temperature": 1}')
    assert choice.text in ("yes", "no")
    pattern = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{3}-[0-9]{4}"}
    number = ask(model_server, MODEL, **ASK, **pattern, temperature=1.0, seed=4)
    assert len(number.text) == 8
    assert number.text.replace("-", "").isdigit()
    assert number.finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "guide"),
    [("regex", "(unclosed"), ("ebnf_grammar", "root ::= missing"), ("json_schema", '{"type": "nonsense"}')],
)
def test_a_grammar_that_does_not_compile_is_refused_by_its_field(model_server, kind, guide):
    answer = ask(model_server, MODEL, **ASK, guided_decoding_guide_type=kind, guided_decoding_guide=guide)
    assert answer.error is not None
    assert "guided_decoding_guide" in answer.error
    assert not answer.outputs


# Several texts


def test_texts_of_one_request_differ_and_repeat(model_server):
    def texts(**options: Any) -> list[str]:
        answer = ask(model_server, MODEL, **STORY, n=3, seed=11, **options)
        assert answer.error is None
        assert answer.usage == 3 * 8
        return answer.sequence_texts

    first = texts(stream=True)
    assert len(set(first)) == 3
    assert texts() == first
    assert ask(model_server, MODEL, **STORY, seed=11).text == first[0]


# Log-probabilities


def test_logprobs_of_greedy_tokens_name_the_likeliest_and_change_nothing(model_server):
    for stream in (True, False):
        asked = {"logprobs": 3, "return_log_probs": True, "return_cumulative_logprob": True, "stream": stream}
        answer = ask(model_server, MODEL, **greedy(CASE, 16, **asked))
        assert answer.token_ids == CASE["output_ids"][:16]
        told = [position for text in answer.joined("logprobs") for position in json.loads(text)]
        assert [next(iter(position)) for position in told] == list(map(str, answer.token_ids))
        tokenizer = open_front("smollm2-135m").tokenizer
        for position, token_id, logprob in zip(told, answer.token_ids, answer.joined("output_log_probs"), strict=True):
            own = position[str(token_id)]
            assert own["rank"] == 1
            assert own["logprob"] == pytest.approx(logprob)
            assert own["decoded_token"] == tokenizer.token_text(token_id)
            assert len(position) == 3
            assert all(about["logprob"] <= own["logprob"] <= 0 for about in position.values())
        total = answer.joined("cumulative_logprob")[-1]
        assert total == pytest.approx(sum(answer.joined("output_log_probs")), rel=1e-4)


def test_prompt_logprobs_tell_of_every_token_but_the_first(model_server):
    answer = ask(model_server, MODEL, input_ids=CASE["prompt_ids"], prompt_logprobs=1, max_tokens=2, stream=True)
    (text,) = answer.outputs[0]["prompt_logprobs"]
    first, *rest = json.loads(text)
    assert first is None
    assert [next(iter(position)) for position in rest] == list(map(str, CASE["prompt_ids"][1:]))
    assert all(about["logprob"] <= 0 and about["rank"] >= 1 for position in rest for about in position.values())
    again = ask(model_server, MODEL, input_ids=CASE["prompt_ids"], prompt_logprobs=1, max_tokens=1)  # prefix is cached
    (repeated,) = again.joined("prompt_logprobs")
    for one, other in zip(rest, json.loads(repeated)[1:], strict=True):
        assert {name: about["logprob"] for name, about in one.items()} == pytest.approx(
            {name: about["logprob"] for name, about in other.items()}, abs=1e-3
        )


# Stop rules and edits


def test_a_stop_id_ends_the_row(model_server):
    ids = CASE["output_ids"]
    stop = next(token for place, token in enumerate(ids) if place >= 4 and token not in ids[:place])
    place = ids.index(stop)
    for include in (False, True):
        options = {"stop_token_ids": [stop], "include_stop_str_in_output": include}
        answer = ask(model_server, MODEL, **greedy(CASE, stream=True, **options))
        assert answer.token_ids == ids[: place + include]
        assert answer.finish_reason == "stop"
        assert answer.joined("stop_reason") == [str(stop)]
    wait_idle(model_server)


def test_a_deadline_ends_the_row_with_what_there_is(model_server):
    started = time.monotonic()
    answer = ask(model_server, MODEL, **greedy(CASE, 5000, timeout_ms=700, stream=True))
    assert answer.finish_reason == "timeout"
    assert 0.6 < time.monotonic() - started < 5
    assert 0 < answer.usage < 5000
    assert answer.token_ids[:4] == CASE["output_ids"][:4]
    wait_idle(model_server)


def test_edits_change_what_is_generated(model_server):
    ids = CASE["output_ids"]
    first = ids[0]
    only = ask(model_server, MODEL, **greedy(CASE, 4, sampling_parameters='{"allowed_token_ids": [28, 29]}'))
    assert set(only.token_ids) <= {28, 29}
    away = ask(model_server, MODEL, **greedy(CASE, 1, sampling_parameters=json.dumps({"logit_bias": {first: -100}})))
    assert away.token_ids[0] != first
    nothing = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "top_k": 0}
    assert ask(model_server, MODEL, **greedy(CASE, 16, **nothing)).token_ids == ids[:16]


# Refusals beside a neighbour

OUT_OF_RANGE = [
    ({"stop_token_ids": [49152], "min_tokens": 1}, "stop_token_ids"),
    ({"stop_token_ids": [-1], "min_tokens": 1}, "stop_token_ids"),
    ({"sampling_parameters": '{"stop_token_ids": [2147483648]}'}, "stop_token_ids"),
    ({"sampling_parameters": '{"logit_bias": {"49152": 5}}'}, "logit_bias"),
    ({"sampling_parameters": '{"min_p": NaN}'}, "min_p"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ({"presence_penalty": float("nan")}, "presence_penalty"),
    *(({"logprobs": count}, "logprobs") for count in (-2, 49152, 49153, 10**6)),
]


def test_refused_requests_leave_their_neighbour_alone(model_server):
    with GrpcStream(model_server, MODEL) as neighbour, GrpcStream(model_server, MODEL) as stream:
        neighbour.send(greedy(CASE, stream=True))
        for values, field in OUT_OF_RANGE:
            stream.send({"text_input": "a", **values})
            answer = stream.collect()
            assert answer.error is not None, values
            assert f"{field}: " in answer.error
        assert_golden(CASE, neighbour.collect().token_ids)


def test_every_control_at_once_leaves_a_plain_neighbour_alone(model_server):
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)}
    requests = [
        greedy(CASE, stream=True),
        {**STORY, "seed": 5, "repetition_penalty": 1.3, "min_p": 0.05, "logprobs": 2},
        {**STORY, "seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.5, "n": 2},
        {**ASK, **guide, "temperature": 1.0, "seed": 7, "max_tokens": 60},
        {**STORY, "seed": 8, "bad_words": [" the"], "stop_words": ["\n"]},
    ]
    plain, *others = ask_many(model_server, MODEL, requests)
    assert_golden(CASE, plain.token_ids)
    assert [answer.error for answer in others] == [None] * len(others)
    assert " the" not in others[3].text
