"""One stream's tokens as the responses the contract promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.conductor.request import stop_code
from mstar.runtime.messages import NO_TOKEN, FinishReason
from mstar.serving.chunks import Chunk
from mstar.serving.responses import Stream
from mstar.text.stream import TextStream

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH
END = 256


def new_stream(tokenizer, *, stop=(), streaming=True, min_tokens=0, include_stop=False, **options) -> Stream:
    text = TextStream(tokenizer, stop, True, min_tokens=min_tokens, include_stop=include_stop)
    asked = {"streaming": streaming, "has_stop": bool(stop), "include_stop": include_stop}
    return Stream(text, 3, **asked, **options)


def feed(stream: Stream, pieces: list[list[int]], finish: FinishReason = LENGTH) -> list[Chunk]:
    """Chunks for groups of tokens, the last group with ``finish``; nothing is fed past a last chunk."""
    chunks = []
    for index, ids in enumerate(pieces):
        chunk = stream.take(ids, finish if index + 1 == len(pieces) else RUNNING)
        if chunk is not None:
            chunks.append(chunk)
            if chunk.finish_reason:
                break
    return chunks


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)


def test_each_token_is_a_chunk_when_streaming(tokenizer):
    chunks = feed(new_stream(tokenizer), [[i] for i in ids_of(tokenizer, "abc")])
    assert [(c.text, c.num_output_tokens, c.finish_reason) for c in chunks] == [
        ("a", 1, None),
        ("b", 1, None),
        ("c", 1, "length"),
    ]
    assert {c.num_input_tokens for c in chunks} == {3}


def test_one_chunk_when_not_streaming(tokenizer):
    chunks = feed(new_stream(tokenizer, streaming=False), [[i] for i in ids_of(tokenizer, "abc")])
    assert [(c.text, c.num_output_tokens, c.finish_reason) for c in chunks] == [("abc", 3, "length")]


def test_an_end_of_sequence_row_adds_no_token(tokenizer):
    chunks = feed(new_stream(tokenizer), [ids_of(tokenizer, "a"), [NO_TOKEN]], STOP)
    assert [(c.text, c.num_output_tokens, c.finish_reason) for c in chunks] == [("a", 1, None), ("", 0, "stop")]


def test_no_tokens_at_all_is_one_empty_last_chunk(tokenizer):
    chunks = feed(new_stream(tokenizer, return_token_ids=True), [[NO_TOKEN]], LENGTH)
    assert chunks == [Chunk("", (), 3, 0, "length")]


def test_a_character_is_sent_when_it_is_whole(tokenizer):
    chunks = feed(new_stream(tokenizer), [[i] for i in ids_of(tokenizer, "é🎉.")])
    assert [(c.text, c.num_output_tokens) for c in chunks] == [("é", 2), ("🎉", 4), (".", 1)]


def test_an_unfinished_character_ends_as_one_replacement(tokenizer):
    ids = ids_of(tokenizer, "a🎉")[:3]
    for streaming in (True, False):
        chunks = feed(new_stream(tokenizer, streaming=streaming), [[i] for i in ids])
        assert "".join(c.text for c in chunks) == "a\ufffd"
        assert sum(c.num_output_tokens for c in chunks) == 3


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("group", [1, 2, 9])
def test_a_stop_string_cuts_text_and_usage(tokenizer, streaming, group):
    ids = ids_of(tokenizer, "say DEFGHIJ no more")
    pieces = [ids[i : i + group] for i in range(0, len(ids), group)]
    stream = new_stream(tokenizer, stop=("DEFG", "zzz"), streaming=streaming, return_token_ids=True)
    chunks = feed(stream, pieces)
    assert "".join(c.text for c in chunks) == "say "
    assert sum(c.num_output_tokens for c in chunks) == 8  # up to the token that completed it
    assert [i for c in chunks for i in c.token_ids] == ids[:8]
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "stop"
    assert stream.matched_stop
    assert stream.num_tokens == 8


def test_held_text_is_released_when_the_match_becomes_impossible(tokenizer):
    chunks = feed(new_stream(tokenizer, stop=("abcd",)), [[i] for i in ids_of(tokenizer, "xabcx")])
    assert [(c.text, c.num_output_tokens) for c in chunks] == [("x", 1), ("abcx", 4)]


def test_held_text_is_released_at_the_end(tokenizer):
    chunks = feed(new_stream(tokenizer, stop=("abcd",)), [[i] for i in ids_of(tokenizer, "abc")])
    assert [(c.text, c.finish_reason) for c in chunks] == [("abc", "length")]


def test_special_tokens_count_and_have_no_text(tokenizer):
    chunks = feed(new_stream(tokenizer, return_token_ids=True), [[END], ids_of(tokenizer, "a"), [END]])
    assert [(c.text, c.token_ids, c.num_output_tokens) for c in chunks] == [("a", (END, 97 - 33), 2), ("", (END,), 1)]


def test_the_prompt_stands_once_before_the_answer(tokenizer):
    chunks = feed(new_stream(tokenizer, streaming=False, prefix="Q: "), [ids_of(tokenizer, "ab")])
    assert [c.text for c in chunks] == ["Q: ab"]


@given(st.text(max_size=40), st.lists(st.integers(1, 5), min_size=60, max_size=60), st.booleans(), st.booleans())
def test_stream_and_single_response_agree_whatever_the_grouping(tokenizer, text, sizes, special, stops):
    ids = ids_of(tokenizer, text) + ([END] if special else [])
    stop = ("ab", "\n") if stops else ()
    pieces, start = [], 0
    for size in sizes * 4:
        if start < len(ids):
            pieces.append(ids[start : start + size])
            start += size
    pieces = pieces or [[NO_TOKEN]]
    streamed = feed(new_stream(tokenizer, stop=stop, return_token_ids=True), pieces)
    (single,) = feed(new_stream(tokenizer, stop=stop, streaming=False, return_token_ids=True), pieces)
    assert "".join(c.text for c in streamed) == single.text
    assert [i for c in streamed for i in c.token_ids] == list(single.token_ids)
    assert sum(c.num_output_tokens for c in streamed) == single.num_output_tokens == len(single.token_ids)
    assert all(c.text for c in streamed[:-1])
    assert streamed[-1].finish_reason == single.finish_reason


def test_what_is_said_once_stands_in_the_first_chunk_alone(tokenizer):
    stream = new_stream(tokenizer)
    stream.tell_prompt("[null]")
    chunks = feed(stream, [[i] for i in ids_of(tokenizer, "abc")])
    assert [chunk.prompt_logprobs for chunk in chunks] == ["[null]", None, None]


# Stop rules


@pytest.mark.parametrize("streaming", [True, False])
def test_the_stop_string_is_the_reason_and_may_be_kept(tokenizer, streaming):
    ids = ids_of(tokenizer, "say DEFG more")
    for include_stop, text in ((False, "say "), (True, "say DEFG")):
        stream = new_stream(
            tokenizer, stop=("DEFG",), streaming=streaming, include_stop=include_stop, return_token_ids=True
        )
        chunks = feed(stream, [[i] for i in ids])
        assert "".join(c.text for c in chunks) == text
        assert [i for c in chunks for i in c.token_ids] == ids[:8]
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", "DEFG")


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_id_is_output_only_where_it_is_to_be_included(tokenizer, streaming):
    hello, mark = ids_of(tokenizer, "hello"), ids_of(tokenizer, "!")[0]
    for include_stop, text, ids in ((False, "hello", hello), (True, "hello!", [*hello, mark])):
        stream = new_stream(tokenizer, streaming=streaming, include_stop=include_stop, return_token_ids=True)
        chunks = feed(stream, [hello, [stop_code(mark)]], STOP)
        assert "".join(c.text for c in chunks) == text
        assert [i for c in chunks for i in c.token_ids] == ids
        assert sum(c.num_output_tokens for c in chunks) == len(ids)
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", str(mark))


def test_a_stop_id_that_completes_a_stop_string_is_stopped_by_the_string(tokenizer):
    mark = ids_of(tokenizer, "!")[0]
    stream = new_stream(tokenizer, stop=("o!",), include_stop=True)
    chunks = feed(stream, [ids_of(tokenizer, "hello"), [stop_code(mark)]], STOP)
    assert "".join(c.text for c in chunks) == "hello!"
    assert chunks[-1].stop_reason == "o!"


@pytest.mark.parametrize("finish", [STOP, LENGTH, FinishReason.TIMEOUT])
def test_other_ends_have_no_stop_reason(tokenizer, finish):
    tokens = [NO_TOKEN] if finish is STOP else ids_of(tokenizer, "b")
    chunks = feed(new_stream(tokenizer), [ids_of(tokenizer, "a"), tokens], finish)
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (finish.text, None)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_deadline_keeps_what_there_is(tokenizer, streaming):
    stream = new_stream(tokenizer, streaming=streaming)
    chunks = feed(stream, [ids_of(tokenizer, "half an ans"), [NO_TOKEN]], FinishReason.TIMEOUT)
    assert "".join(c.text for c in chunks) == "half an ans"
    assert chunks[-1].finish_reason == "timeout"


@pytest.mark.parametrize("streaming", [True, False])
def test_stop_strings_wait_for_min_tokens(tokenizer, streaming):
    ids = ids_of(tokenizer, "ab ab ab")
    chunks = feed(new_stream(tokenizer, stop=("ab",), streaming=streaming, min_tokens=4), [[i] for i in ids])
    assert "".join(c.text for c in chunks) == "ab ab "
    assert sum(c.num_output_tokens for c in chunks) == len(ids)
