"""Incremental text equals the one-shot decode, and no character is ever split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.text.gguf_tokenizer import TokenType, tokenizer_from_gguf

from .conftest import byte_level_metadata, sentencepiece_metadata


def stream(tokenizer, pushes, **options):
    detokenizer = tokenizer.detokenizer(**options)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.flush()]


def one_by_one(ids):
    return [[id] for id in ids]


@st.composite
def split_ids(draw, max_id):
    """Ids and one way of splitting them into pushes."""
    ids = draw(st.lists(st.integers(0, max_id), max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return ids, [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@settings(deadline=None)
@given(case=split_ids(257), skip=st.booleans())
def test_text_does_not_depend_on_the_pushes(byte_level, case, skip):
    ids, pushes = case
    assert "".join(stream(byte_level, pushes, skip_special_tokens=skip)) == byte_level.decode(ids, skip)
    assert "".join(stream(byte_level, one_by_one(ids), skip_special_tokens=skip)) == byte_level.decode(ids, skip)


@settings(deadline=None)
@given(case=split_ids(257), skip=st.booleans())
def test_decode_equals_the_library_after_orphan_bytes(byte_level, case, skip):
    ids = [65, *case[0]]
    assert byte_level.decode(ids, skip) == byte_level._backend.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(text=st.text(), skip=st.booleans(), eos=st.booleans())
def test_sentencepiece_decode_equals_the_library(sentencepiece, text, skip, eos):
    ids = sentencepiece.encode(text) + [2] * eos
    assert sentencepiece.decode(ids, skip) == sentencepiece._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(sentencepiece, one_by_one(ids), skip_special_tokens=skip)) == sentencepiece.decode(ids, skip)


@settings(deadline=None)
@given(text=st.text())
def test_every_delta_is_made_of_whole_characters(byte_level, text):
    deltas = stream(byte_level, one_by_one(byte_level.encode(text)), skip_special_tokens=False)
    assert "".join(deltas) == text
    assert deltas[-1] == ""


@pytest.mark.parametrize("text", ["\U0001fae0 ok", "\u9f9c", "\u010f", "\u05e9\u05dc\u05d5\u05dd"])
def test_nothing_is_sent_before_a_character_is_complete(byte_level, text):
    deltas = stream(byte_level, one_by_one(text.encode()))
    assert "".join(deltas) == text
    assert all(len(delta) <= 1 for delta in deltas)


def test_orphan_bytes_of_a_character_begun_by_the_prompt_are_dropped(byte_level):
    ids = [0xB6, *b" hot"]  # the prompt ended with F0 9F 8C
    assert "".join(stream(byte_level, one_by_one(ids))) == byte_level.decode(ids) == " hot"


def test_orphan_bytes_are_dropped_at_the_start_only(byte_level):
    assert byte_level.decode([0x80, 65, 0x80, 66]) == "A\ufffdB"
    assert byte_level.decode([0x80] * 5) == "\ufffd\ufffd"  # no character has more than three to claim


def test_unfinished_character_at_the_end_is_one_replacement(byte_level):
    ids = [*byte_level.encode(" party"), 0xF0, 0x9F]
    deltas = stream(byte_level, one_by_one(ids))
    assert deltas[-3:] == ["", "", "\ufffd"]
    assert "".join(deltas) == byte_level.decode(ids) == " party\ufffd"


def test_special_tokens_are_shown_only_on_request(byte_level):
    ids = byte_level.encode("a<|end|>b<tool>c")
    assert byte_level.decode(ids) == "ab<tool>c"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<|end|>b<tool>c"


def test_added_tokens_are_plain_text_in_a_byte_level_vocabulary():
    metadata = byte_level_metadata(["ab"])
    metadata["tokenizer.ggml.tokens"] += ["\u00e9", "\u0120 x"]
    metadata["tokenizer.ggml.token_type"] += [TokenType.USER_DEFINED] * 2
    metadata["tokenizer.ggml.tokens"][0xE9] = "[e9]"
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("\u00e9\u0120 x")) == "\u00e9\u0120 x"


def test_added_tokens_follow_the_decoder_of_a_sentencepiece_vocabulary():
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"] += ["\u2581\u2581\u2581", "\n\n"]
    metadata["tokenizer.ggml.token_type"] += [TokenType.USER_DEFINED] * 2
    metadata["tokenizer.ggml.scores"] += [-1000.0, -1001.0]
    tokenizer = tokenizer_from_gguf(metadata)
    ids = [tokenizer._backend.token_to_id(token) for token in ("\u2581a", "\u2581\u2581\u2581", "\u2581is", "\n\n")]
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == "a    is\n\n"


@pytest.mark.parametrize("ids", [[-1], [10**9], [9999, 99999]])
def test_ids_without_text_add_nothing(byte_level, ids):
    assert stream(byte_level, [[65], ids, [66]]) == ["A", "", "B", ""]


def test_arrays_are_taken_like_lists(byte_level):
    assert byte_level.decode(np.frombuffer(b"abc", np.uint8).astype(np.int32)) == "abc"


def test_sentencepiece_spaces_survive_streaming(sentencepiece):
    text = "Daenerys is the Khaleesi"
    ids = sentencepiece.encode(text, add_special_tokens=False)
    deltas = stream(sentencepiece, one_by_one(ids))
    assert "".join(deltas) == text
    assert any(delta.startswith(" ") for delta in deltas)


def test_only_one_leading_space_goes_and_only_at_the_very_start(sentencepiece):
    space = sentencepiece._backend.token_to_id("\u2581")
    assert sentencepiece.decode([space, space]) == " "
    assert sentencepiece.decode([1, space], skip_special_tokens=False) == "<s> "


def test_the_space_after_orphan_bytes_stays(sentencepiece):
    byte, space = (sentencepiece._backend.token_to_id(token) for token in ("<0xB6>", "\u2581"))
    for pushes in ([[byte, space]], [[byte], [space]]):
        assert "".join(stream(sentencepiece, pushes)) == " "


def test_leading_space_stays_where_the_tokenizer_adds_none():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
    assert tokenizer.decode(tokenizer.encode(" is", add_special_tokens=False)) == " is"


def test_byte_tokens_form_characters(sentencepiece):
    ids = sentencepiece.encode("\U0001f336", add_special_tokens=False)
    assert sentencepiece.token_bytes(ids[-1]) == b"\xb6"
    assert sentencepiece.decode(ids) == "\U0001f336"
