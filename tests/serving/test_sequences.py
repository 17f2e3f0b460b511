"""Several sequences behind one reply."""

from __future__ import annotations

import time

import pytest
from serving_fakes import ManualEngine, RecordingReply, records, wait_until

from mstar.conductor.deadlines import EXPIRED
from mstar.runtime.messages import NO_TOKEN, EngineRequest, FinishReason
from mstar.serving.cancels import ROUND_S
from mstar.serving.responses import Stream
from mstar.serving.sequences import MAX_SEQUENCES, Sequences, split_ticket, ticket_of
from mstar.text.stream import TextStream
from mstar.utils.errors import ErrorCode, Unavailable

REQUEST = EngineRequest(prompt_ids=b"\0\0\0\0", max_tokens=64, temperature=1.0)
LENGTH, STOP, TIMEOUT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.TIMEOUT


def open_sequences(engine: ManualEngine, tokenizer, n=3, stop=(), streaming=True) -> tuple[list[int], RecordingReply]:
    """Tickets and reply of one request with ``n`` sequences."""
    reply = RecordingReply()
    before = set(engine.submitted)
    streams = [
        Stream(TextStream(tokenizer, stop), 1, streaming=streaming, has_stop=bool(stop), sequence_index=index)
        for index in range(n)
    ]
    sequences = Sequences(reply, streams, streaming=streaming, tell_prompt=lambda made: f"[{made.size}]")
    engine.frontend.open(sequences, [REQUEST] * n)
    return sorted(set(engine.submitted) - before), reply


def test_tickets_are_the_requests_number_and_the_sequences_index():
    tickets = [ticket_of(number, index) for number in (1, 2, 2**40) for index in (0, 5, MAX_SEQUENCES - 1)]
    assert len(set(tickets)) == len(tickets)
    assert [ticket_of(*split_ticket(ticket)) for ticket in tickets] == tickets


def test_each_sequence_streams_under_its_index_and_one_end_is_the_last(engine, tokenizer):
    tickets, reply = open_sequences(engine, tokenizer)
    texts = ["one", "number two", "3"]
    left = {ticket: tokenizer.encode(text) for ticket, text in zip(tickets, texts, strict=True)}
    while left:
        ends = {ticket: LENGTH for ticket, ids in left.items() if len(ids) == 1}
        engine.step({ticket: ids[0] for ticket, ids in left.items()}, ends)
        left = {ticket: ids[1:] for ticket, ids in left.items() if len(ids) > 1}
    assert reply.over.wait(5)
    for index, text in enumerate(texts):
        mine = [chunk for chunk in reply.chunks if chunk.sequence_index == index]
        assert "".join(chunk.text for chunk in mine) == text
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + ["length"]
    assert reply.ends == 1
    assert engine.frontend.num_open == 0


def test_not_streaming_one_response_has_all_in_their_order(engine, tokenizer):
    tickets, reply = open_sequences(engine, tokenizer, streaming=False)
    for ticket, text in reversed(list(zip(tickets, ["one", "two", "three"], strict=True))):
        assert not reply.over.is_set()
        engine.emit(ticket, tokenizer.encode(text), LENGTH)
    assert reply.over.wait(5)
    ((first, second, third),) = reply.responses
    assert (first.text, second.text, third.text) == ("one", "two", "three")
    assert [chunk.sequence_index for chunk in (first, second, third)] == [0, 1, 2]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_string_ends_its_own_sequence_alone(engine, tokenizer, streaming):
    (one, two), reply = open_sequences(engine, tokenizer, n=2, stop=("END",), streaming=streaming)
    engine.emit(one, tokenizer.encode("a END b"))
    engine.emit(two, tokenizer.encode("fine"), LENGTH)
    assert reply.over.wait(5)
    assert engine.finished == {one: 5}
    assert engine.cancelled == []
    texts = ["".join(c.text for c in reply.chunks if c.sequence_index == index) for index in range(2)]
    assert texts == ["a ", "fine"]
    assert {c.sequence_index: c.stop_reason for c in reply.chunks if c.finish_reason} == {0: "END", 1: None}


def test_rows_behind_a_stop_string_change_nothing(engine, tokenizer):
    (one, two), reply = open_sequences(engine, tokenizer, n=2, stop=("END",))
    engine.emit(one, tokenizer.encode("a END"))
    engine.emit(one, tokenizer.encode(" b"), LENGTH)
    engine.emit(two, tokenizer.encode("fine"), LENGTH)
    assert reply.over.wait(5)
    assert [chunk.finish_reason for chunk in reply.chunks if chunk.finish_reason] == ["stop", "length"]
    assert "".join(chunk.text for chunk in reply.chunks if chunk.sequence_index == 1) == "fine"
    assert engine.frontend.num_open == 0


def test_a_stop_string_in_the_engines_last_row_ends_nothing_again(engine, tokenizer):
    (one, two), reply = open_sequences(engine, tokenizer, n=2, stop=("END",))
    engine.emit(one, tokenizer.encode("a END"), LENGTH)
    engine.emit(two, tokenizer.encode("b"), LENGTH)
    assert reply.over.wait(5)
    assert [c.finish_reason for c in reply.chunks if c.sequence_index == 0][-1] == "stop"
    assert engine.finished == {}


def test_a_cancel_is_passed_on_once_however_long_its_answer_takes(engine, tokenizer):
    tickets, reply = open_sequences(engine, tokenizer)
    reply.gate.clear()
    engine.emit(tickets[0], tokenizer.encode("a"))
    reply.cancelled = True
    wait_until(lambda: engine.cancelled)
    time.sleep(6 * ROUND_S)
    assert engine.cancelled == tickets
    reply.gate.set()
    assert reply.over.wait(5)
    assert reply.ends == 1


def test_one_sequences_failure_ends_the_request_and_cancels_the_others(engine, tokenizer):
    (one, two, three), reply = open_sequences(engine, tokenizer)
    engine.emit(one, tokenizer.encode("a"), LENGTH)
    engine.frontend.on_failed(two, ErrorCode.INTERNAL, "logits are not finite")
    assert reply.over.wait(5)
    assert reply.errors == [(ErrorCode.INTERNAL, "logits are not finite")]
    assert engine.cancelled == [three]
    engine.emit(three, tokenizer.encode("c"), FinishReason.CANCELLED)
    assert reply.ends == 1


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("is_late_first", [True, False])
def test_texts_whose_time_is_over_before_they_run_end_beside_those_that_ran(
    engine, tokenizer, streaming, is_late_first
):
    (one, two, three, four), reply = open_sequences(engine, tokenizer, n=4, streaming=streaming)
    engine.emit(one, tokenizer.encode("done"), LENGTH)
    engine.emit(three, tokenizer.encode("half"))
    if not is_late_first:
        engine.emit(three, [NO_TOKEN], TIMEOUT)
    for ticket in (four, two):
        engine.frontend.on_failed(ticket, ErrorCode.UNAVAILABLE, EXPIRED)
    if is_late_first:
        engine.emit(three, [NO_TOKEN], TIMEOUT)
    assert reply.over.wait(5)
    ends = sorted((c.sequence_index, c.finish_reason) for c in reply.chunks if c.finish_reason)
    assert ends == [(0, "length"), (1, "timeout"), (2, "timeout"), (3, "timeout")]
    texts = ["".join(c.text for c in reply.chunks if c.sequence_index == index) for index in range(4)]
    assert texts == ["done", "", "half", ""]
    assert reply.usage == 8
    assert all(len(response) == (1 if streaming else 4) for response in reply.responses)
    assert (reply.ends, reply.errors, engine.cancelled) == (1, [], [])
    assert engine.frontend.num_open == 0


def test_a_text_with_a_row_has_begun_though_its_time_brought_no_token(engine, tokenizer):
    (one, two), reply = open_sequences(engine, tokenizer, n=2)
    engine.frontend.on_failed(two, ErrorCode.UNAVAILABLE, EXPIRED)
    engine.emit(one, [NO_TOKEN], TIMEOUT)
    assert reply.over.wait(5)
    assert [(c.sequence_index, c.finish_reason, c.text) for c in reply.chunks] == [
        (0, "timeout", ""),
        (1, "timeout", ""),
    ]


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_none_of_whose_texts_ran_in_time_is_refused(engine, tokenizer, n):
    tickets, reply = open_sequences(engine, tokenizer, n=n)
    for ticket in tickets:
        engine.frontend.on_failed(ticket, ErrorCode.UNAVAILABLE, EXPIRED)
    assert reply.over.wait(5)
    assert (reply.errors, reply.responses) == ([(ErrorCode.UNAVAILABLE, EXPIRED)], [])
    assert engine.cancelled == []
    assert engine.frontend.num_open == 0


def test_beside_a_late_text_another_failure_still_ends_the_request(engine, tokenizer):
    (one, two, three), reply = open_sequences(engine, tokenizer)
    engine.frontend.on_failed(two, ErrorCode.UNAVAILABLE, EXPIRED)
    engine.frontend.on_failed(one, ErrorCode.UNAVAILABLE, "the queue is full")
    assert reply.over.wait(5)
    assert reply.errors == [(ErrorCode.UNAVAILABLE, "the queue is full")]
    assert engine.cancelled == [three]


def test_a_failure_after_a_stop_string_is_nobodys(engine, tokenizer):
    (one, two), reply = open_sequences(engine, tokenizer, n=2, stop=("END",))
    engine.emit(one, tokenizer.encode("END"))
    engine.frontend.on_failed(one, ErrorCode.INTERNAL, "logits are not finite")
    engine.emit(two, tokenizer.encode("fine"), LENGTH)
    assert reply.over.wait(5)
    assert reply.errors == []


def test_a_cancel_ends_all_sequences_with_one_error(engine, tokenizer):
    tickets, reply = open_sequences(engine, tokenizer)
    reply.cancelled = True
    assert reply.over.wait(0.5)
    assert reply.errors == [(ErrorCode.CANCELLED, "the client cancelled the request")]
    assert engine.cancelled == tickets


def test_a_refused_sequence_refuses_the_request(engine, tokenizer):
    submit = engine.submit

    def refuse_the_third(ticket: int, request: EngineRequest) -> None:
        if split_ticket(ticket)[1] == 2:
            raise Unavailable("the queue is full")
        submit(ticket, request)

    engine.submit = refuse_the_third
    tickets, reply = open_sequences(engine, tokenizer, n=4)
    assert reply.over.wait(5)
    assert reply.errors == [(ErrorCode.UNAVAILABLE, "the queue is full")]
    assert len(tickets) == 2
    wait_until(lambda: set(tickets) <= set(engine.cancelled))


def test_a_cancel_while_sequences_are_submitted_leaves_none_running(engine, tokenizer):
    submit = engine.submit
    reply_of: list[Sequences] = []

    def cancel_during_the_second(ticket: int, request: EngineRequest) -> None:
        submit(ticket, request)
        if split_ticket(ticket)[1] == 1:
            (sequences,) = engine.frontend._open.values()
            sequences.reply.cancelled = True
            reply_of.append(sequences)
            assert sequences.reply.over.wait(5)
            engine.cancelled.clear()  # of what the engine had not heard yet, it has forgotten the cancel

    engine.submit = cancel_during_the_second
    tickets, reply = open_sequences(engine, tokenizer)
    assert reply.ends == 1
    assert set(tickets) <= set(engine.cancelled)


def test_loss_of_the_engine_and_drain_end_a_request_once(engine, tokenizer):
    _, reply = open_sequences(engine, tokenizer)
    engine.frontend.on_engine_lost("killed by signal 9")
    assert reply.over.wait(5)
    assert [code for code, _ in reply.errors] == [ErrorCode.INTERNAL]


def test_siblings_are_sent_by_one_thread(engine, tokenizer):
    tickets, reply = open_sequences(engine, tokenizer, n=9)
    reply.gate.clear()
    engine.step({ticket: tokenizer.encode("a")[0] for ticket in tickets})
    engine.step({ticket: tokenizer.encode("b")[0] for ticket in tickets}, dict.fromkeys(tickets, LENGTH))
    wait_until(lambda: len(engine.frontend._pool._held) == 1)
    reply.gate.set()
    assert reply.over.wait(5)
    assert ["".join(c.text for c in reply.chunks if c.sequence_index == index) for index in range(9)] == ["ab"] * 9


@pytest.mark.parametrize("streaming", [True, False])
def test_what_is_told_of_the_prompt_comes_once_in_the_first_response(engine, tokenizer, streaming):
    (one, two), reply = open_sequences(engine, tokenizer, n=2, streaming=streaming)
    engine.frontend.on_prompt_logprobs(one, records([-1.0, -2.0]))
    for ticket in (one, two):
        engine.emit(ticket, tokenizer.encode("ab"), LENGTH)
    assert reply.over.wait(5)
    assert [chunk.prompt_logprobs for chunk in reply.chunks if chunk.prompt_logprobs] == ["[2]"]
    assert reply.chunks[0].prompt_logprobs == "[2]"
