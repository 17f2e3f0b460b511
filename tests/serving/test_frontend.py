"""Open requests between an engine's steps and their replies."""

from __future__ import annotations

import threading

import pytest
from serving_fakes import ManualEngine, RecordingReply, wait_until

from mstar.runtime.messages import EngineRequest, FinishReason
from mstar.serving.frontend import Frontend
from mstar.serving.responses import Stream
from mstar.serving.sequences import Sequences
from mstar.text.stream import TextStream
from mstar.utils.errors import ErrorCode, Unavailable

REQUEST = EngineRequest(prompt_ids=b"\0\0\0\0", max_tokens=64, temperature=0.0)


def open_stream(engine: ManualEngine, tokenizer, stop=(), streaming=True) -> tuple[int, RecordingReply]:
    reply = RecordingReply()
    stream = Stream(TextStream(tokenizer, stop, True), 1, streaming=streaming, has_stop=bool(stop))
    engine.frontend.open(Sequences(reply, [stream], streaming=streaming), [REQUEST])
    return max(engine.submitted), reply


def test_tokens_become_responses_in_order(engine, tokenizer):
    ticket, reply = open_stream(engine, tokenizer)
    ids = tokenizer.encode("The quick brown fox")
    engine.emit(ticket, ids, FinishReason.LENGTH)
    assert reply.over.wait(5)
    assert reply.text == "The quick brown fox"
    assert reply.usage == len(ids)
    assert reply.chunks[-1].finish_reason == "length"
    assert engine.frontend.num_open == 0


def test_tokens_that_come_during_a_send_join_the_next_response(engine, tokenizer):
    ticket, reply = open_stream(engine, tokenizer)
    reply.gate.clear()
    ids = tokenizer.encode("abcdef")
    engine.emit(ticket, ids[:1])
    wait_until(lambda: not engine.frontend._pool._waiting)
    engine.emit(ticket, ids[1:], FinishReason.LENGTH)
    reply.gate.set()
    assert reply.over.wait(5)
    assert [chunk.text for chunk in reply.chunks] == ["a", "bcdef"]
    assert [chunk.num_output_tokens for chunk in reply.chunks] == [1, 5]


def test_tokens_that_come_before_their_requests_turn_join_its_response(engine, tokenizer):
    blocked = [open_stream(engine, tokenizer) for _ in range(4)]  # as many as there are senders
    ticket, reply = open_stream(engine, tokenizer)
    first, *rest = tokenizer.encode("abcdef")
    for other, gated in blocked:
        gated.gate.clear()
        engine.emit(other, [first])
    wait_until(lambda: not engine.frontend._pool._waiting)
    engine.emit(ticket, [first])
    engine.emit(ticket, rest, FinishReason.LENGTH)
    blocked[2][1].gate.set()  # whichever sender is free takes it
    assert reply.over.wait(5)
    assert [chunk.text for chunk in reply.chunks] == ["abcdef"]
    for _, gated in blocked:
        gated.gate.set()


def test_first_responses_go_before_further_ones(tokenizer):
    engine, sent = ManualEngine(), []
    engine.frontend = Frontend(engine, num_senders=1)
    opened = [open_stream(engine, tokenizer) for _ in range(6)]
    for number, (_, reply) in enumerate(opened):
        reply.send = lambda chunks, *, final, number=number, send=reply.send: (
            sent.append(number), send(chunks, final=final)
        )  # fmt: skip
    old, new = opened[:3], opened[3:]
    for ticket, _ in old:
        engine.emit(ticket, tokenizer.encode("a"))
    wait_until(lambda: len(sent) == 3)
    old[0][1].gate.clear()
    engine.emit(old[0][0], tokenizer.encode("b"), FinishReason.LENGTH)
    wait_until(lambda: len(sent) == 4)
    for ticket, _ in [*old[1:], *new]:
        engine.emit(ticket, tokenizer.encode("b"), FinishReason.LENGTH)
    old[0][1].gate.set()
    engine.frontend.close()
    assert sent[3:] == [0, 3, 4, 5, 1, 2]


def test_what_waits_when_the_front_end_closes_is_sent(tokenizer):
    engine = ManualEngine()
    engine.frontend = Frontend(engine, num_senders=1)
    opened = [open_stream(engine, tokenizer) for _ in range(3)]
    opened[0][1].gate.clear()
    for ticket, _ in opened:
        engine.emit(ticket, tokenizer.encode("ab"), FinishReason.LENGTH)
    closing = threading.Thread(target=engine.frontend.close)
    closing.start()
    opened[0][1].gate.set()
    closing.join(5)
    assert [reply.text for _, reply in opened] == ["ab"] * 3


def test_many_streams_are_not_mixed(engine, tokenizer):
    texts = [f"stream {index} says {'xyz'[index % 3] * index}" for index in range(40)]
    replies = {}
    left = {}
    for text in texts:
        ticket, reply = open_stream(engine, tokenizer)
        replies[ticket] = (text, reply)
        left[ticket] = tokenizer.encode(text)
    while left:
        ends = {ticket: FinishReason.LENGTH for ticket, ids in left.items() if len(ids) == 1}
        engine.step({ticket: ids[0] for ticket, ids in left.items()}, ends)
        left = {ticket: ids[1:] for ticket, ids in left.items() if len(ids) > 1}
    for text, reply in replies.values():
        assert reply.over.wait(5)
        assert reply.text == text
        assert reply.ends == 1


def test_a_stop_string_finishes_the_request_at_the_engine(engine, tokenizer):
    ticket, reply = open_stream(engine, tokenizer, stop=("END",))
    engine.emit(ticket, tokenizer.encode("one END"))
    assert reply.over.wait(5)
    engine.emit(ticket, tokenizer.encode(" two"))  # what the engine made before it knew
    assert engine.finished == {ticket: 7}
    assert reply.text == "one "
    assert reply.usage == 7
    assert reply.ends == 1


def test_a_cancel_ends_the_stream_once_and_tells_the_engine(engine, tokenizer):
    ticket, reply = open_stream(engine, tokenizer)
    engine.emit(ticket, tokenizer.encode("ab"))
    reply.cancelled = True
    assert reply.over.wait(0.5)
    assert reply.errors == [(ErrorCode.CANCELLED, "the client cancelled the request")]
    assert engine.cancelled == [ticket]
    engine.emit(ticket, tokenizer.encode("c"), FinishReason.CANCELLED)
    assert reply.ends == 1


def test_an_error_comes_after_the_tokens_before_it(engine, tokenizer):
    ticket, reply = open_stream(engine, tokenizer)
    reply.gate.clear()
    engine.emit(ticket, tokenizer.encode("abc"))
    engine.frontend.on_failed(ticket, ErrorCode.INTERNAL, "logits are not finite")
    reply.gate.set()
    assert reply.over.wait(5)
    assert reply.text == "abc"
    assert reply.errors == [(ErrorCode.INTERNAL, "logits are not finite")]


def test_loss_of_the_engine_ends_every_request_once(engine, tokenizer):
    replies = [open_stream(engine, tokenizer)[1] for _ in range(9)]
    engine.alive = False
    engine.frontend.on_engine_lost("killed by signal 9")
    for reply in replies:
        assert reply.over.wait(5)
        ((code, message),) = reply.errors
        assert code is ErrorCode.INTERNAL
        assert "signal 9" in message
    assert not engine.frontend.is_ready
    with pytest.raises(Unavailable, match="signal 9"):
        open_stream(engine, tokenizer)


def test_a_refused_submit_is_answered(engine, tokenizer):
    def refuse(ticket: int, request: EngineRequest) -> None:
        raise Unavailable("the queue is full")

    engine.submitted[0] = REQUEST
    engine.submit = refuse
    _, reply = open_stream(engine, tokenizer)
    assert reply.over.wait(5)
    assert reply.errors == [(ErrorCode.UNAVAILABLE, "the queue is full")]


def test_drain_lets_requests_end_then_ends_the_rest(engine, tokenizer):
    first, ends_itself = open_stream(engine, tokenizer)
    _, is_ended = open_stream(engine, tokenizer)
    drain = threading.Thread(target=engine.frontend.drain)
    drain.start()
    wait_until(lambda: not engine.frontend.is_ready)
    with pytest.raises(Unavailable, match="shutting down"):
        open_stream(engine, tokenizer)
    engine.emit(first, tokenizer.encode("a"), FinishReason.LENGTH)
    assert ends_itself.over.wait(0.15)
    drain.join(5)
    assert is_ended.over.wait(5)
    assert ends_itself.text == "a"
    assert [code for code, _ in is_ended.errors] == [ErrorCode.UNAVAILABLE]


def test_a_send_that_fails_ends_only_its_own_stream(engine, tokenizer):
    broken_ticket, broken = open_stream(engine, tokenizer)
    ticket, reply = open_stream(engine, tokenizer)

    def raises(chunks, *, final):
        raise RuntimeError("no shared memory left")

    broken.send = raises
    engine.emit(broken_ticket, tokenizer.encode("a"))
    engine.emit(ticket, tokenizer.encode("b"), FinishReason.LENGTH)
    assert broken.over.wait(5)
    assert reply.over.wait(5)
    assert broken.errors[0][0] is ErrorCode.INTERNAL
    assert engine.cancelled == [broken_ticket]
    assert reply.text == "b"


def test_close_leaves_no_thread():
    before = threading.active_count()
    frontend = Frontend(ManualEngine())
    assert threading.active_count() == before + 5
    frontend.drain()
    frontend.close()
    assert threading.active_count() == before
