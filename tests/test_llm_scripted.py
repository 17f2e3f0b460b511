"""The offline API over an engine that says what a test writes: what becomes of rows, codes, records and failures."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

import mstar.llm
from mstar import LLM
from mstar.conductor import faults
from mstar.conductor.deadlines import EXPIRED
from mstar.conductor.report import Failure, PromptLogprobs, StepReport
from mstar.conductor.request import LOGPROB, NO_TOKEN, FinishReason, stop_code
from mstar.model.front import ModelFront
from mstar.runtime.logprobs import Logprob
from mstar.text.tokenizer import Tokenizer
from mstar.utils.errors import EngineFault, ErrorCode, InvalidArgument, Unavailable

LETTERS = "abcdefgh"
END = 8  # a special token
RUNNING, STOP, LENGTH, TIMEOUT = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIMEOUT


def letters_front() -> ModelFront:
    """A model of a letter per token: ids 0 to 7 are a to h."""
    backend = tokenizers.Tokenizer(models.WordLevel({letter: id for id, letter in enumerate(LETTERS)}, "a"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return ModelFront("letters", 9, 64, frozenset({END}), Tokenizer(backend))


class Scripted:
    """A driver whose reports a test writes: lists of (ticket, token, finish), and what else a report holds."""

    def __init__(self, options=None) -> None:
        self.info = SimpleNamespace(max_seq_len=64)
        self.requests, self.script, self.said, self.refused = [], deque(), [], None
        self.room = 10**6

    def check(self, request):
        if self.refused is not None and request.guide is not None and request.guide.text == self.refused:
            raise InvalidArgument("guided_decoding_guide", "a grammar", self.refused)

    def submit(self, request):
        if len(self.requests) == self.room:
            raise Unavailable("full")
        self.requests.append(request)
        return len(self.requests) - 1

    def cancel(self, ticket):
        self.said.append(("cancel", ticket))

    def finish(self, ticket, kept_tokens):
        self.said.append(("finish", ticket, kept_tokens))

    def say(self, *rows, **more) -> None:
        tickets, tokens, finish = (
            (np.array(column, np.int64) for column in zip(*rows, strict=True)) if rows else [_NO] * 3
        )
        self.script.append(StepReport(tickets, _NO, tickets, tokens, finish, **more))

    def poll(self):
        self.room = 10**6
        return self.script.popleft()

    def close(self) -> None:
        assert not self.script, "the script was not played to its end"


_NO = np.empty(0, np.int64)


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setattr(mstar.llm, "open_front", lambda name: letters_front())
    monkeypatch.setattr(mstar.llm, "InProcess", Scripted)
    with LLM("letters") as llm:
        yield llm


def record(logprob, rank, *top):
    entry = np.zeros(1, LOGPROB)
    entry["logprob"], entry["rank"], entry["top_ids"] = logprob, rank, -1
    for index, (token_id, value) in enumerate(top):
        entry["top_ids"][0, index], entry["top_logprobs"][0, index] = token_id, value
    return entry


def test_texts_of_a_prompt_stand_together_in_the_prompts_order(llm):
    llm.driver.say((0, 1, RUNNING), (1, 2, RUNNING), (2, 3, RUNNING), (3, 4, LENGTH))
    llm.driver.say((2, 5, LENGTH), (0, 6, LENGTH), (1, 7, LENGTH))
    done = llm.generate([{"input_ids": [0, 1], "n": 3}, {"input_ids": [0]}], {"seed": 3, "temperature": 1})
    assert [(c.index, c.text, c.output_ids, c.num_input_tokens) for c in done] == [
        (0, "bg", [1, 6], 2), (1, "ch", [2, 7], 2), (2, "df", [3, 5], 2), (0, "e", [4], 1),
    ]  # fmt: skip
    assert len({request.seed for request in llm.driver.requests[:3]}) == 3


def test_a_stop_id_of_the_request_is_no_output_but_the_reason(llm):
    llm.driver.say((0, 1, RUNNING), (1, 1, RUNNING))
    llm.driver.say((0, stop_code(5), STOP), (1, NO_TOKEN, STOP))
    done = llm.generate([[0], [0]], {"stop_token_ids": [5]})
    assert [(c.text, c.output_ids, c.finish_reason, c.stop_reason) for c in done] == [
        ("b", [1], "stop", "5"), ("b", [1], "stop", None),
    ]  # fmt: skip


def test_a_stop_id_is_output_where_it_is_to_be_included(llm):
    params = {"stop_token_ids": [5, END], "include_stop_str_in_output": True, "skip_special_tokens": False}
    llm.driver.say((0, 1, RUNNING), (1, stop_code(END), STOP))
    llm.driver.say((0, stop_code(5), STOP))
    done = llm.generate([[0], [0]], params)
    assert [(c.text, c.output_ids, c.stop_reason) for c in done] == [("bf", [1, 5], "5"), ("<end>", [END], "8")]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_is_the_reason_and_the_engine_is_told(llm, include, text):
    for token in range(4):
        llm.driver.say((0, token, RUNNING))
    (done,) = llm.generate({"input_ids": [0], "stop": "cd", "include_stop_str_in_output": include})
    assert (done.text, done.output_ids, done.stop_reason) == (text, [0, 1, 2, 3], "cd")
    assert llm.driver.said == [("finish", 0, 4)]


def test_a_stop_string_is_not_seen_before_the_fewest_tokens(llm):
    for token in (2, 1, 2, 3):
        llm.driver.say((0, token, RUNNING))
    (done,) = llm.generate({"input_ids": [0], "stop": ["c", "d"], "min_tokens": 3})
    assert (done.text, done.stop_reason) == ("cbc", "d")


def test_time_that_is_over_ends_a_text_with_what_exists(llm):
    llm.driver.say((0, 1, RUNNING))
    llm.driver.say((0, NO_TOKEN, TIMEOUT))
    (done,) = llm.generate({"input_ids": [0], "timeout_ms": 5})
    assert (done.text, done.finish_reason, done.stop_reason) == ("b", "timeout", None)


def test_the_time_of_a_request_counts_from_its_call(llm):
    llm.driver.say((0, 1, LENGTH))
    before = time.monotonic_ns()
    llm.generate({"input_ids": [0], "timeout_ms": 1000})
    assert before + 10**9 <= llm.driver.requests[0].deadline_ns <= time.monotonic_ns() + 10**9


def test_one_failure_cancels_what_else_the_call_runs(llm):
    llm.driver.say((2, 1, LENGTH), failures=[Failure(0, 0, 0, ErrorCode.INTERNAL, "broken")])
    with pytest.raises(EngineFault, match="broken"):
        llm.generate([[0], [0], [0]])
    llm.driver.say(failures=[Failure(3, 0, 3, ErrorCode.INVALID_ARG, str(faults.error_of(faults.NOTHING_LEFT, 2)))])
    with pytest.raises(InvalidArgument, match=r"got none at token 2$") as caught:
        next(llm.stream({"input_ids": [0], "n": 2, "temperature": 1}))
    assert caught.value.field == faults.CONSTRAINTS
    assert llm.driver.said == [("cancel", 1), ("cancel", 4)]


def test_a_text_that_ended_at_the_engine_is_not_ended_again(llm):
    llm.driver.say((0, 1, RUNNING), (1, 1, RUNNING))
    llm.driver.say((0, 2, LENGTH), (1, stop_code(3), STOP))
    one, two = llm.generate([[0], [0]], {"stop": ["c", "zz"], "stop_token_ids": [3]})
    assert (one.text, one.finish_reason, two.text, two.finish_reason) == ("b", "stop", "b", "stop")
    assert llm.driver.said == []


def test_time_that_is_over_in_the_queue_is_an_error(llm):
    llm.driver.say(failures=[Failure(0, 0, 0, ErrorCode.UNAVAILABLE, "timeout_ms: over")])
    with pytest.raises(Unavailable, match="timeout_ms: over"):
        llm.generate({"input_ids": [0], "timeout_ms": 5})


LATE = [Failure(ticket, 0, ticket, ErrorCode.UNAVAILABLE, EXPIRED) for ticket in range(3)]


@pytest.mark.parametrize("is_late_first", [True, False])
def test_texts_that_never_ran_in_time_end_beside_one_that_did(llm, is_late_first):
    request = {"input_ids": [0], "n": 3, "temperature": 1, "timeout_ms": 50, "logprobs": 0}

    def play():
        first, records = len(llm.driver.requests), record(-0.5, 1)
        late = [replace(LATE[0], ticket=first + index) for index in (0, 2)]
        if is_late_first:
            llm.driver.say(failures=late)
            llm.driver.say((first + 1, 1, RUNNING), logprob_rows=np.array([0]), logprobs=records)
            llm.driver.say((first + 1, NO_TOKEN, TIMEOUT))
        else:
            llm.driver.say((first + 1, 1, TIMEOUT), logprob_rows=np.array([0]), logprobs=records, failures=late)

    play()
    done = llm.generate(request)
    assert [(c.index, c.text, c.output_ids, c.finish_reason, len(c.logprobs)) for c in done] == [
        (0, "", [], "timeout", 0), (1, "b", [1], "timeout", 1), (2, "", [], "timeout", 0),
    ]  # fmt: skip
    play()
    pieces = list(llm.stream(request))
    ends = sorted((piece.index, piece.finish_reason) for piece in pieces if piece.finish_reason)
    assert ends == [(0, "timeout"), (1, "timeout"), (2, "timeout")]
    assert [piece.text for piece in pieces if piece.text] == ["b"]
    assert llm.driver.said == []


@pytest.mark.parametrize("runs", [True, False])
def test_a_text_whose_time_is_over_as_it_is_handed_over_is_late_too(llm, runs, monkeypatch):
    request = {"input_ids": [0], "n": 2, "temperature": 1, "timeout_ms": 5}
    submit = llm.driver.submit

    def refuse(request):
        if len(llm.driver.requests) == runs:
            raise Unavailable(EXPIRED)
        return submit(request)

    monkeypatch.setattr(llm.driver, "submit", refuse)
    if not runs:
        with pytest.raises(Unavailable, match="timeout_ms"):
            llm.generate(request)
        return
    llm.driver.say((0, 1, TIMEOUT))
    assert [(c.text, c.finish_reason) for c in llm.generate(request)] == [("b", "timeout"), ("", "timeout")]


def test_of_a_prompt_whose_texts_are_all_late_the_call_fails(llm):
    request = {"input_ids": [0], "n": 2, "temperature": 1, "timeout_ms": 5}
    llm.driver.say((2, 1, RUNNING), failures=LATE[:1])
    llm.driver.say(failures=LATE[1:2])
    with pytest.raises(Unavailable, match="timeout_ms"):
        llm.generate([request, {"input_ids": [0]}])
    for ticket in (3, 4):
        llm.driver.say(failures=[replace(LATE[0], ticket=ticket)])
    with pytest.raises(Unavailable, match="timeout_ms"):
        next(llm.stream(request))
    assert llm.driver.said == [("cancel", 2)]


def test_logprobs_are_those_of_the_tokens_that_count(llm):
    # The row between asked for none; the last token comes after the stop string and does not count.
    records = np.concatenate([record(-0.5, 1, (1, -0.5), (2, -1.5)), record(-3.0, 9, (1, -0.25), (2, -1.25))])
    llm.driver.say((1, 1, RUNNING), (0, 1, RUNNING), logprob_rows=np.array([1]), logprobs=records[:1])
    llm.driver.say((0, 3, RUNNING), (1, 2, LENGTH), logprob_rows=np.array([0]), logprobs=records[1:])
    asked, not_asked = llm.generate([{"input_ids": [0], "logprobs": 1, "stop": "d"}, [0]])
    assert asked.logprobs == [{1: Logprob(-0.5, 1, "b")}, {3: Logprob(-3.0, 9, "d"), 1: Logprob(-0.25, 1, "b")}]
    assert asked.cumulative_logprob == -3.5
    assert (not_asked.logprobs, not_asked.cumulative_logprob, not_asked.prompt_logprobs) == (None, None, None)


@pytest.mark.parametrize(("include", "ids"), [(False, [1]), (True, [1, 5])])
def test_an_end_without_output_has_no_logprob(llm, include, ids):
    records = np.concatenate([record(-0.5, 1), record(-1.0, 2)])
    llm.driver.say((0, 1, RUNNING), logprob_rows=np.array([0]), logprobs=records[:1])
    llm.driver.say((0, stop_code(5), STOP), logprob_rows=np.array([0]), logprobs=records[1:])
    params = {"stop_token_ids": [5], "logprobs": 0, "include_stop_str_in_output": include}
    (done,) = llm.generate({"input_ids": [0]} | params)
    assert [list(position) for position in done.logprobs] == [[token_id] for token_id in ids]


def test_sums_are_told_where_only_they_were_asked_for(llm):
    llm.driver.say((0, 1, LENGTH), logprob_rows=np.array([0]), logprobs=record(-0.5, 1))
    (done,) = llm.generate({"input_ids": [0], "return_cumulative_logprob": True})
    assert done.cumulative_logprob == -0.5
    assert llm.driver.requests[0].num_logprobs == 0


def test_a_prompts_logprobs_begin_with_its_second_token_and_come_with_the_first_text(llm):
    told = np.concatenate([record(-0.5, 1, (1, -0.5)), record(-2.0, 3, (1, -0.5))])
    llm.driver.say((0, 3, LENGTH), (1, 3, LENGTH), prompt_logprobs=[PromptLogprobs(0, 0, told)])
    first, second = llm.generate({"input_ids": [0, 1, 2], "prompt_logprobs": 1, "n": 2, "temperature": 1})
    assert first.prompt_logprobs == [
        None, {1: Logprob(-0.5, 1, "b")}, {2: Logprob(-2.0, 3, "c"), 1: Logprob(-0.5, 1, "b")},
    ]  # fmt: skip
    assert second.prompt_logprobs is None


def test_a_prompt_of_one_token_has_nothing_to_tell(llm):
    llm.driver.say((0, 3, LENGTH))
    (done,) = llm.generate({"input_ids": [0], "prompt_logprobs": 1})
    assert done.prompt_logprobs == [None]


def test_a_stream_of_several_texts_tells_them_apart(llm):
    llm.driver.say((0, 1, RUNNING), (1, 2, RUNNING))
    llm.driver.say((1, 3, LENGTH))
    llm.driver.say((0, stop_code(5), STOP))
    pieces = list(llm.stream({"input_ids": [0], "n": 2, "stop_token_ids": [5], "temperature": 1}))
    assert [(p.index, p.text, p.output_ids, p.finish_reason, p.stop_reason) for p in pieces] == [
        (0, "b", [1], None, None), (1, "c", [2], None, None), (1, "d", [3], "length", None), (0, "", [], "stop", "5"),
    ]  # fmt: skip


def test_a_stream_of_more_texts_than_the_engine_takes_gets_them_all(llm):
    llm.driver.room = 1
    llm.driver.say((0, 1, LENGTH))
    llm.driver.say((1, 2, LENGTH))
    pieces = list(llm.stream({"input_ids": [0], "n": 2, "temperature": 1}))
    assert [(piece.index, piece.text) for piece in pieces] == [(0, "b"), (1, "c")]


def test_pieces_carry_the_logprobs_of_their_tokens(llm):
    records = np.concatenate([record(-0.5, 1), record(-1.0, 2)])
    llm.driver.say((0, 1, RUNNING), logprob_rows=np.array([0]), logprobs=records[:1])
    llm.driver.say((0, 2, LENGTH), logprob_rows=np.array([0]), logprobs=records[1:])
    pieces = list(llm.stream({"input_ids": [0], "logprobs": 0}))
    assert [piece.logprobs for piece in pieces] == [[{1: Logprob(-0.5, 1, "b")}], [{2: Logprob(-1.0, 2, "c")}]]


def test_a_closed_stream_cancels_all_its_texts(llm):
    llm.driver.say((0, 1, RUNNING), (1, 2, RUNNING))
    stream = llm.stream({"input_ids": [0], "n": 2, "temperature": 1})
    next(stream)
    stream.close()
    assert llm.driver.said == [("cancel", 0), ("cancel", 1)]


@pytest.mark.parametrize(
    ("request_", "field"),
    [({"n": 17}, "n"), ({"n": 2, "temperature": 0}, "n"), ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
     ({"stop_token_ids": [9]}, "stop_token_ids"), ({"exclude_input_in_output": False}, "exclude_input_in_output"),
     ({"guided_json": "{"}, "guided_json")],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_by_its_name_before_anything_runs(llm, request_, field):
    bad = {"input_ids": [0], **request_}
    for attempt in (lambda: llm.generate([[0], bad]), lambda: llm.stream(bad), lambda: llm.check(bad)):
        with pytest.raises(InvalidArgument) as caught:
            attempt()
        assert caught.value.field == field
    assert llm.driver.requests == []


def test_what_only_the_engine_can_refuse_is_asked_before_anything_runs(llm):
    llm.driver.refused = "(a"
    bad = {"input_ids": [0], "guided_regex": "(a"}
    for attempt in (lambda: llm.generate([[0], bad]), lambda: llm.check(bad)):
        with pytest.raises(InvalidArgument, match=r"^guided_decoding_guide: "):
            attempt()
    assert llm.driver.requests == []


def test_a_shared_setting_gives_way_to_the_requests_own(llm):
    llm.driver.say((0, 1, LENGTH))
    llm.generate(
        {"input_ids": [0], "guided_choice": ["a"], "top_k": 3},
        mstar.SamplingParams(guided_decoding_guide_type="json", top_k=9, min_p=0.5),
    )
    (request,) = llm.driver.requests
    assert (request.guide.kind, request.top_k, request.min_p) == ("choice", 3, 0.5)
