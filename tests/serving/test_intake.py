"""What a request asks for, from its tensors to the engine and back to its outputs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from serving_fakes import ManualEngine, RecordingReply, record, records

from mstar.conductor.request import stop_code
from mstar.model.front import ModelFront
from mstar.runtime.messages import NO_TOKEN, EngineRequest, FinishReason, Welcome
from mstar.runtime.options import EngineOptions, FrontOptions
from mstar.serving.intake import Intake, room_of
from mstar.serving.parse import RawRequest
from mstar.utils.errors import InvalidArgument

END = 256
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
ARRIVAL_NS = 10**9


class Served:
    """A request on its way: what the engine was asked, and what came back."""

    def __init__(self, engine: ManualEngine, tokenizer: Any, asked: dict[str, Any], **options: Any) -> None:
        front = ModelFront("bytes", 257, 64, frozenset({END}), tokenizer)
        self.engine, self.reply, before = engine, RecordingReply(), set(engine.submitted)
        text = np.array([json.dumps({"text_input": "abc", **asked}).encode()], np.object_)
        intake = Intake(front, FrontOptions(**options), engine.frontend)
        intake.take(RawRequest({"sampling_parameters": text}), self.reply, ARRIVAL_NS)
        self.tickets = sorted(set(engine.submitted) - before)

    @property
    def request(self) -> EngineRequest:
        return self.engine.submitted[self.tickets[0]]

    def answer(self, *ids: list[int], finish: FinishReason = LENGTH, logprobs: Any = ()):
        """Plays the tokens of each sequence; the last chunk of each."""
        for ticket, mine in zip(self.tickets, ids, strict=True):
            self.engine.emit(ticket, mine, finish, logprobs)
        assert self.reply.over.wait(5)
        assert not self.reply.errors
        return [chunk for chunk in self.reply.chunks if chunk.finish_reason]


@pytest.fixture
def serve(engine, tokenizer):
    return lambda **asked: Served(engine, tokenizer, asked)


@pytest.mark.parametrize(
    ("queue", "bound"),
    [
        ({"max_queued_requests": 3}, "max_queued_requests"),
        ({"max_queued_requests_per_tenant": 3}, "max_queued_requests_per_tenant"),
        ({"max_queued_requests": 3, "max_queued_requests_per_tenant": 4}, "max_queued_requests"),
    ],
)
def test_more_texts_than_can_ever_run_and_wait_are_refused(engine, tokenizer, queue, bound):
    front = ModelFront("bytes", 257, 64, frozenset({END}), tokenizer)
    welcome = Welcome("bytes", 257, 64, 2, 3, 0, 0, 0, "cpu", "float32", 0.0)
    room = room_of(welcome, EngineOptions(model="any", **queue))
    intake = Intake(front, FrontOptions(), engine.frontend, room=room)

    def take(n):
        text = np.array([json.dumps({"text_input": "abc", "n": n, "temperature": 1.0}).encode()], np.object_)
        intake.take(RawRequest({"sampling_parameters": text}), RecordingReply(), ARRIVAL_NS)

    take(5)
    with pytest.raises(InvalidArgument, match=rf"^n: at most 5, which is max_running_requests and {bound} together"):
        take(6)
    assert len(engine.submitted) == 5


def test_a_request_without_wishes_is_told_of_nothing_more(serve, tokenizer):
    served = serve()
    assert (served.request.num_logprobs, served.request.num_prompt_logprobs) == (-1, -1)
    (chunk,) = served.answer(tokenizer.encode("xy"))
    assert (chunk.text, chunk.num_input_tokens, chunk.num_output_tokens) == ("xy", 3, 2)
    assert (chunk.token_ids, chunk.logprobs, chunk.log_probs, chunk.cumulative_logprob) == (None,) * 4
    assert (chunk.stop_reason, chunk.prompt_logprobs, chunk.sequence_index) == (None,) * 3


@pytest.mark.parametrize(
    ("asked", "num_asked", "outputs"),
    [
        ({"logprobs": 2}, 2, {"logprobs"}),
        ({"return_log_probs": True}, 0, {"log_probs"}),
        ({"return_cumulative_logprob": True}, 0, {"cumulative_logprob"}),
        ({"logprobs": 1, "return_log_probs": True}, 1, {"logprobs", "log_probs"}),
    ],
)
def test_only_the_logprobs_that_were_asked_for_come_back(serve, tokenizer, asked, num_asked, outputs):
    served = serve(**asked)
    assert served.request.num_logprobs == num_asked
    (chunk,) = served.answer(tokenizer.encode("xy"), logprobs=[-1.0, -2.0])
    told = {"logprobs": chunk.logprobs, "log_probs": chunk.log_probs, "cumulative_logprob": chunk.cumulative_logprob}
    assert {name for name, value in told.items() if value is not None} == outputs


def test_a_prompt_is_told_of_as_far_as_was_asked(serve, tokenizer, engine):
    served = serve(prompt_logprobs=1)
    other = tokenizer.encode("z")[0]
    told = np.concatenate([record(-2.0, 3, {other: -1.0}), record(-0.5, 1, {tokenizer.encode("c")[0]: -0.5})])
    engine.frontend.on_prompt_logprobs(served.tickets[0], told)
    (chunk,) = served.answer(tokenizer.encode("x"))
    first, second, third = json.loads(chunk.prompt_logprobs)
    assert first is None
    assert [about["decoded_token"] for about in second.values()] == ["b", "z"]
    assert [about["decoded_token"] for about in third.values()] == ["c"]


@pytest.mark.parametrize(("include", "text", "reason"), [(False, "a", "!"), (True, "a!", "!")])
def test_a_stop_string_is_kept_where_it_is_asked_for(serve, tokenizer, include, text, reason):
    served = serve(stop="!", include_stop_str_in_output=include)
    (chunk,) = served.answer(tokenizer.encode("a!b"))
    assert (chunk.text, chunk.stop_reason, chunk.num_output_tokens) == (text, reason, 2)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a!")])
def test_a_stop_id_is_kept_where_it_is_asked_for(serve, tokenizer, include, text):
    (mark,) = tokenizer.encode("!")
    served = serve(stop_token_ids=[mark], include_stop_str_in_output=include)
    assert served.request.stop_ids == (mark,)
    (chunk,) = served.answer([*tokenizer.encode("a"), stop_code(mark)], finish=STOP)
    assert (chunk.text, chunk.stop_reason, chunk.num_output_tokens) == (text, str(mark), len(text))


def test_stop_strings_wait_for_as_many_tokens_as_the_engine_was_told(serve, tokenizer):
    served = serve(stop="!", min_tokens=2)
    assert served.request.min_tokens == 2
    (chunk,) = served.answer(tokenizer.encode("!!a!"))
    assert (chunk.text, chunk.num_output_tokens) == ("!!a", 4)


def test_special_tokens_are_shown_where_they_are_not_skipped(serve, tokenizer):
    asked = {"input_ids": [END, *tokenizer.encode("a")], "text_input": None, "exclude_input_in_output": False}
    for skip, text in ((True, "ax"), (False, "<end>ax<end>")):
        (chunk,) = serve(**asked, skip_special_tokens=skip).answer([*tokenizer.encode("x"), END])
        assert (chunk.text, chunk.num_output_tokens) == (text, 2)


def test_several_texts_have_an_index_each_and_end_on_their_own(serve, tokenizer):
    served = serve(n=3, temperature=1.0, seed=4, stop="!", return_token_ids=True, logprobs=0, prompt_logprobs=0)
    assert len({served.engine.submitted[ticket].seed for ticket in served.tickets}) == 3
    one, two = served.tickets[1:]
    served.engine.emit(one, tokenizer.encode("b!zz"), logprobs=[-1.0, -2.0, -3.0, -4.0])
    served.engine.emit(two, [NO_TOKEN], STOP)
    assert not served.reply.over.is_set()
    served.engine.frontend.on_prompt_logprobs(served.tickets[0], records([-1.0, -1.0]))
    served.engine.emit(served.tickets[0], tokenizer.encode("aaaa"), LENGTH, [-0.5] * 4)
    assert served.reply.over.wait(5)
    (response,) = served.reply.responses
    assert [chunk.sequence_index for chunk in response] == [0, 1, 2]
    assert [(chunk.text, chunk.finish_reason, chunk.stop_reason) for chunk in response] == [
        ("aaaa", "length", None), ("b", "stop", "!"), ("", "stop", None),
    ]  # fmt: skip
    assert [chunk.num_output_tokens for chunk in response] == [4, 2, 0]
    assert [len(chunk.token_ids) for chunk in response] == [4, 2, 0]
    assert [len(json.loads(chunk.logprobs)) for chunk in response] == [4, 2, 0]
    assert [chunk.prompt_logprobs is None for chunk in response] == [False, True, True]


def test_a_deadline_counts_from_arrival(serve):
    assert serve(timeout_ms=5).request.deadline_ns == ARRIVAL_NS + 5_000_000


def test_options_fill_in_what_a_request_leaves_open(engine, tokenizer):
    options = {"default_temperature": 0.3, "default_top_k": 7, "default_max_tokens": 9}
    request = Served(engine, tokenizer, {"top_k": 5}, **options).request
    assert (request.temperature, request.top_k, request.max_tokens) == (0.3, 5, 9)


def test_a_refused_request_reaches_neither_engine_nor_reply(engine, tokenizer):
    with pytest.raises(InvalidArgument, match=r"^logit_bias: token ids in"):
        Served(engine, tokenizer, {"logit_bias": {"257": 1}})
    assert not engine.submitted
    assert engine.frontend.num_open == 0
