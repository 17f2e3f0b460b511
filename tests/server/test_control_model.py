"""Generation control through a real server and the real model, where the engine's own part counts."""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any

import pytest
from golden import CASES, MODEL, board, greedy, wait_idle
from serving_client import GrpcStream, ask, ask_many, post

pytestmark = [pytest.mark.server, pytest.mark.model]

CASE = CASES[0]
IDS: list[int] = CASE["output_ids"]
STOP = IDS[4]
AT = IDS.index(STOP)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_id_has_its_logprob_where_it_is_output(model_server, stream, include):
    asked = {"stop_token_ids": [STOP], "include_stop_str_in_output": include, "stream": stream, "logprobs": 1}
    asked |= {"return_log_probs": True, "return_cumulative_logprob": True, "prompt_logprobs": 0}
    answer = ask(model_server, MODEL, **greedy(CASE, **asked))
    kept = IDS[: AT + include]
    assert (answer.token_ids, answer.usage) == (kept, len(kept))
    assert answer.joined("stop_reason") == [str(STOP)]
    told = [position for text in answer.joined("logprobs") for position in json.loads(text)]
    assert [int(next(iter(position))) for position in told] == kept
    assert all(about["rank"] >= 1 for position in told for about in position.values())
    values = answer.joined("output_log_probs")
    assert len(values) == len(kept)
    assert all(value < 0 for value in values)
    assert answer.joined("cumulative_logprob")[-1] == pytest.approx(math.fsum(values), abs=1e-4)
    (prompt,) = answer.joined("prompt_logprobs")
    assert len(json.loads(prompt)) == answer.num_input_tokens


def test_seeded_texts_differ_and_the_first_is_the_one_alone(model_server):
    base = {"text_input": "Once upon a time", "temperature": 1.0, "seed": 3, "max_tokens": 8}
    alone = ask(model_server, MODEL, **base)
    for stream in (True, False):
        several = ask(model_server, MODEL, **base, n=3, stream=stream)
        assert several.sequence_texts[0] == alone.text
        assert len(set(several.sequence_texts)) == 3
        assert several.usage <= 24


def test_a_guide_is_kept_and_a_broken_one_refused_by_its_field(model_server):
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{3}-[a-f]{2}"}
    text = ask(model_server, MODEL, text_input="Code:", temperature=1.0, max_tokens=32, **guide).text
    assert len(text) == 6
    assert text[3] == "-"
    status, body = post(model_server, MODEL, {"text_input": "Code:", **guide, "guided_decoding_guide": "(a"})
    assert status == 400
    assert json.loads(body)["error"].startswith("guided_decoding_guide: a regular expression")


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"allowed_token_ids": [5], "logit_bias": {}, "bad_words": ["<file_sep>"]},
        "^allowed_token_ids, .* at token 1",
    ),
    ({"repetition_window": 1025}, "repetition_window: "),
    ({"prompt_logprobs": 0, "max_tokens": 0}, "max_tokens: "),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_decoding_guide: .*uniqueItems"),
    ({"guided_choice": []}, "guided_choice: not empty"),
    ({"stop_token_ids": [49152], "min_tokens": 1}, "stop_token_ids: "),
]


def test_what_the_engine_refuses_leaves_a_neighbour_in_peace(model_server):
    refused = [
        {"text_input": "a", "sampling_parameters": json.dumps({"max_tokens": 4} | values)} for values, _ in REFUSED
    ]
    neighbour, *answers = ask_many(model_server, MODEL, [greedy(CASE, 24), *refused])
    for answer, (_, message) in zip(answers, REFUSED, strict=True):
        assert answer.error is not None
        assert re.search(message, answer.error), answer.error
    assert neighbour.token_ids == IDS[:24]


def test_a_cancel_ends_all_texts_of_a_request(model_server):
    stream = GrpcStream(model_server, MODEL)
    asked = {"temperature": 1.0, "n": 4, "ignore_eos": True, "max_tokens": 3000, "stream": True}
    stream.send({"text_input": "Once upon a time", **asked})
    counters, deadline = board(model_server), time.monotonic() + 10
    while counters.running < 4:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    stream.close(cancel=True)
    wait_idle(model_server, 5)


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_ends_a_running_text_with_what_exists(model_server, stream):
    answer = ask(model_server, MODEL, **greedy(CASE, 3000, timeout_ms=400, stream=stream))
    assert answer.finish_reason == "timeout"
    assert 0 < answer.usage < 3000
    assert answer.token_ids[:24] == IDS[: min(24, answer.usage)]
    wait_idle(model_server, 2)
