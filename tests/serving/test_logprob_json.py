"""Log-probabilities of the tokens that count, however they come."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_fakes import ManualEngine, RecordingReply, record, records

from mstar.conductor.request import stop_code
from mstar.runtime.messages import NO_TOKEN, EngineRequest, FinishReason
from mstar.serving.logprobs import LOWEST, TokenLogprobs, prompt_json
from mstar.serving.responses import Stream
from mstar.serving.sequences import Sequences
from mstar.text.stream import TextStream

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH


def new_stream(tokenizer, *, stop=(), streaming=True, include_stop=False) -> Stream:
    return Stream(
        TextStream(tokenizer, stop, include_stop=include_stop),
        3,
        streaming=streaming,
        has_stop=bool(stop),
        include_stop=include_stop,
        return_token_ids=True,
        logprobs=TokenLogprobs(tokenizer, num_top=0, each=True, total=True),
    )


def feed(stream: Stream, pieces: list[list[int]], finish=LENGTH):
    """Chunks; the token at place i has log-probability -(i + 1)."""
    chunks, place = [], 0
    for index, ids in enumerate(pieces):
        told = records([-(place + i + 1.0) for i in range(len(ids))])
        place += len(ids)
        chunk = stream.take(ids, finish if index + 1 == len(pieces) else RUNNING, told)
        if chunk is not None:
            chunks.append(chunk)
            if chunk.finish_reason:
                break
    return chunks


def test_json_names_each_token_by_its_id(tokenizer):
    a, b = tokenizer.encode("ab")
    told = TokenLogprobs(tokenizer, num_top=2)
    told.add([a], record(-1.5, 2, {b: -0.5, a: -1.5}))
    (position,) = json.loads(told.tell()["logprobs"])
    assert list(position) == [str(a), str(b)]
    assert position[str(a)] == {"logprob": -1.5, "rank": 2, "decoded_token": "a"}
    assert position[str(b)] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}


def test_what_json_cannot_hold_is_told_as_the_lowest_number(tokenizer):
    a, b = tokenizer.encode("ab")
    told = TokenLogprobs(tokenizer, num_top=1, each=True, total=True)
    told.add([a], record(-np.inf, 99, {b: -np.inf}))
    fields = told.tell()
    (position,) = json.loads(fields["logprobs"])
    assert {about["logprob"] for about in position.values()} == {LOWEST}
    assert fields["log_probs"] == [LOWEST]
    assert fields["cumulative_logprob"] == LOWEST


def test_a_piece_of_a_character_has_text_in_json(tokenizer):
    first = tokenizer.encode("🎉")[0]
    told = TokenLogprobs(tokenizer, num_top=0)
    told.add([first], record(-1.0))
    (position,) = json.loads(told.tell()["logprobs"])
    assert position[str(first)]["decoded_token"] == "\ufffd"


def test_only_what_was_asked_for_is_told(tokenizer):
    for asked, field in (
        ({"num_top": 0}, "logprobs"),
        ({"each": True}, "log_probs"),
        ({"total": True}, "cumulative_logprob"),
    ):
        told = TokenLogprobs(tokenizer, **asked)
        told.add(tokenizer.encode("a"), record(-1.0))
        assert set(told.tell()) == {field}


def test_a_prompts_first_token_has_none(tokenizer):
    ids = np.array(tokenizer.encode("abc"), np.int32)
    first, second, third = json.loads(prompt_json(records([-1.0, -2.0]), ids, 0, tokenizer))
    assert first is None
    assert (list(second), list(third)) == ([str(ids[1])], [str(ids[2])])
    assert third[str(ids[2])]["logprob"] == -2.0
    assert json.loads(prompt_json(records([]), ids[:1], 0, tokenizer)) == [None]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("group", [1, 3, 20])
@pytest.mark.parametrize("include_stop", [True, False])
def test_tokens_after_a_stop_string_are_not_told(tokenizer, streaming, group, include_stop):
    ids = tokenizer.encode("say END more text")
    pieces = [ids[i : i + group] for i in range(0, len(ids), group)]
    chunks = feed(new_stream(tokenizer, stop=("END",), streaming=streaming, include_stop=include_stop), pieces)
    kept = [i for chunk in chunks for i in chunk.token_ids]
    assert kept == ids[:7]
    assert [value for chunk in chunks for value in chunk.log_probs] == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
    assert [int(name) for chunk in chunks for told in json.loads(chunk.logprobs) for name in told] == kept
    assert chunks[-1].cumulative_logprob == -28.0


def test_an_end_that_is_no_output_is_not_told(tokenizer):
    mark = tokenizer.encode("!")[0]
    for end, include_stop, told in ((NO_TOKEN, False, 2), (stop_code(mark), False, 2), (stop_code(mark), True, 3)):
        chunks = feed(new_stream(tokenizer, include_stop=include_stop), [tokenizer.encode("ab"), [end]], STOP)
        assert sum(len(chunk.log_probs) for chunk in chunks) == told
        assert chunks[-1].cumulative_logprob == (-3.0 if told == 2 else -6.0)


@given(st.text(max_size=30), st.lists(st.integers(1, 5), min_size=60, max_size=60), st.booleans(), st.booleans())
def test_every_response_tells_of_exactly_its_own_tokens(tokenizer, text, sizes, streaming, stops):
    ids = tokenizer.encode(text)
    pieces, start = [], 0
    for size in sizes * 2:
        if start < len(ids):
            pieces.append(ids[start : start + size])
            start += size
    chunks = feed(new_stream(tokenizer, stop=("a", "\n") if stops else (), streaming=streaming), pieces or [[NO_TOKEN]])
    place = 0
    for chunk in chunks:
        assert chunk.num_output_tokens == len(chunk.token_ids) == len(chunk.log_probs)
        assert [int(name) for told in json.loads(chunk.logprobs) for name in told] == list(chunk.token_ids)
        assert chunk.log_probs == [-(place + i + 1.0) for i in range(len(chunk.log_probs))]
        place += len(chunk.log_probs)
        assert chunk.cumulative_logprob == -place * (place + 1) / 2


def test_records_reach_their_own_stream_among_others(engine: ManualEngine, tokenizer):
    replies = {}
    for index in range(8):
        reply = RecordingReply()
        told = TokenLogprobs(tokenizer, each=True) if index % 2 else None
        stream = Stream(TextStream(tokenizer), 1, streaming=True, logprobs=told)
        request = EngineRequest(prompt_ids=b"\0\0\0\0", max_tokens=64, temperature=0.0)
        engine.frontend.open(Sequences(reply, [stream], streaming=True), [request])
        replies[max(engine.submitted)] = reply
    asked = list(replies)[1::2]
    for place in range(5):
        tokens = dict.fromkeys(replies, tokenizer.encode("abcde")[place])
        ends = dict.fromkeys(replies, LENGTH) if place == 4 else None
        engine.step(tokens, ends, {ticket: -(place + ticket / 2**20) for ticket in asked})
    for ticket, reply in replies.items():
        assert reply.over.wait(5)
        assert reply.text == "abcde"
        told = [chunk.log_probs for chunk in reply.chunks]
        if ticket in asked:
            assert [v for each in told for v in each] == pytest.approx([-(p + ticket / 2**20) for p in range(5)])
        else:
            assert told == [None] * len(told)
