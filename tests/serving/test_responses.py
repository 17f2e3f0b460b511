"""One stream's tokens as the responses the contract promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_fakes import RecordingReply

from mstar.runtime.messages import NO_TOKEN, FinishReason
from mstar.serving.contract import OUTPUT_BY_NAME
from mstar.serving.responses import Chunk, Stream
from mstar.text.stream import TextStream

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH
END = 256


def new_stream(tokenizer, *, stop=(), streaming=True, **options) -> Stream:
    text = TextStream(tokenizer, stop, True)
    return Stream(RecordingReply(), text, 3, streaming=streaming, has_stop=bool(stop), **options)


def feed(stream: Stream, pieces: list[list[int]], finish: FinishReason = LENGTH) -> list[Chunk]:
    """Chunks for groups of tokens, the last group with ``finish``; nothing is fed past a last chunk."""
    chunks = []
    for index, ids in enumerate(pieces):
        chunk = stream.take(np.array(ids, np.int32), finish if index + 1 == len(pieces) else RUNNING)
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


def test_tensors_have_the_contracts_types():
    tensors = Chunk("é", (1, 2), 3, 2, "stop").tensors()
    assert set(tensors) == set(OUTPUT_BY_NAME)
    for name, array in tensors.items():
        assert array.dtype == OUTPUT_BY_NAME[name].numpy_type
        assert array.ndim == 1
    assert tensors["text_output"][0] == "é".encode()


def test_outputs_not_asked_for_are_absent():
    assert set(Chunk("a", None, 3, 1).tensors()) == {"text_output", "num_input_tokens", "num_output_tokens"}
    assert set(Chunk("a", (1,), 3, 1, "stop").tensors({"finish_reason"})) == {"finish_reason"}
