"""Decoders that look at a token's neighbours: streamed text equals the library's decode of all ids."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models

from mstar.text.tokenizer import Tokenizer

TOKENS = [
    *("he", "##llo", "##", ".", "n't", " do not", "\ufffd", "a", "a b", " ", "", "  c "),  # words, spaces
    *("x</w>", "</w>", "y</w>z", "</", "w>", "<pad>", "|", "a|", "<pad>a"),  # ends of words, CTC
    *("\u2581", "\u2581\u2581", "\u2581the", "t\u2581", "ab", "aab", "aa", "b"),  # SentencePiece, overlaps
    *("\u00e9", "\u0120a", "<0x41>", "<0x61>", "<0x7c>"),
]
ADDED = [
    AddedToken("<tool>", special=False),
    AddedToken(" sp ", lstrip=True, rstrip=True, special=False),
    AddedToken("\u2581\u2581q", special=False),
    AddedToken("[CLS]", special=True),
    AddedToken("[MASK]", lstrip=True, special=True),
]
NUM_IDS = len(TOKENS) + len(ADDED)

# What may be known before the text is over is sent at once: the text sent is the decode of the ids so far.
IMMEDIATE = {
    "wordpiece": decoders.WordPiece(),
    "wordpiece as it is": decoders.WordPiece(cleanup=False),
    "wordpiece, other prefix": decoders.WordPiece(prefix="\u2581"),
    "ctc": decoders.CTC(),
    "ctc as it is": decoders.CTC(cleanup=False),
    "metaspace": decoders.Metaspace(),
    "metaspace, first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "none": None,
    "fuse": decoders.Fuse(),
    "replace": decoders.Replace("a", "bb"),
    "replace by expression": decoders.Sequence([decoders.Replace(Regex("[ab]+"), "-"), decoders.Fuse()]),
    "strip of tokens": decoders.Strip(" ", 1, 0),
    "strip of the text": decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    ),
    "bytes among tokens": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "sentencepiece": decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "sentencepiece, two spaces": decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    ),
    "nested": decoders.Sequence(
        [decoders.Sequence([decoders.WordPiece(), decoders.Fuse()]), decoders.Strip("h", 1, 0)]
    ),
}
DELAYED = {
    "word ends": decoders.BPEDecoder(),
    "replace in the text": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "-")]),
    "replace overlapping in the text": decoders.Sequence(
        [decoders.Fuse(), decoders.Replace("aab", ""), decoders.Replace("</w>", " ")]
    ),
    "word ends after bytes": decoders.Sequence([decoders.ByteLevel(), decoders.Replace("</w>", " ")]),
    "words fused": decoders.Sequence([decoders.BPEDecoder(), decoders.Fuse(), decoders.Strip("x", 1, 0)]),
}


def build(decoder, more=()) -> Tokenizer:
    vocab = {token: id for id, token in enumerate([*TOKENS, *more])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    for token in ADDED:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    return Tokenizer(backend)


BUILT = {name: build(decoder) for name, decoder in (IMMEDIATE | DELAYED).items()}
IDS = st.lists(st.integers(0, NUM_IDS), max_size=16)  # one past the last id is unknown
CUTS = st.lists(st.integers(0, 16), max_size=4)


@pytest.mark.parametrize("name", BUILT)
@settings(deadline=None, max_examples=60)
@given(ids=IDS, cuts=CUTS, skip=st.booleans())
def test_streamed_text_equals_the_decode_of_the_library(name, ids, cuts, skip):
    tokenizer = BUILT[name]
    expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for pushes in ([ids[a:b] for a, b in pairwise(bounds)], [[id] for id in ids]):
        detokenizer = tokenizer.detokenizer(skip)
        assert "".join(detokenizer.push(part) for part in pushes) + detokenizer.flush() == expected
    assert tokenizer.decode(ids, skip) == expected


@pytest.mark.parametrize("name", IMMEDIATE)
@settings(deadline=None, max_examples=30)
@given(ids=IDS, skip=st.booleans())
def test_nothing_is_held_back_that_cannot_change(name, ids, skip):
    tokenizer = BUILT[name]
    detokenizer, sent = tokenizer.detokenizer(skip), ""
    for count, id in enumerate(ids, start=1):
        sent += detokenizer.push([id])
        assert sent == tokenizer._backend.decode(ids[:count], skip_special_tokens=skip)


@pytest.mark.parametrize("name", BUILT)
@settings(deadline=None, max_examples=20)
@given(head=IDS, one=IDS, other=IDS)
def test_forks_go_separate_ways(name, head, one, other):
    tokenizer = BUILT[name]
    detokenizer = tokenizer.detokenizer()
    text = detokenizer.push(head)
    twin = detokenizer.fork()
    assert text + detokenizer.push(one) + detokenizer.flush() == tokenizer.decode(head + one)
    assert text + twin.push(other) + twin.flush() == tokenizer.decode(head + other)


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("wordpiece", "he", b" he"),
        ("wordpiece", "##llo", b"llo"),
        ("wordpiece", ".", b"."),
        ("metaspace", "\u2581the", b" the"),
        ("word ends", "x</w>", b"x "),
        ("ctc", "<pad>", b""),
        ("ctc", "|", b" "),
        ("none", "a", b" a"),
        ("word ends after bytes", "\u00e9", b"\xe9"),
        ("bytes among tokens", "<0x41>", b"A"),
        ("replace in the text", "aab", b"a-"),
    ],
)
def test_bytes_of_a_token_are_those_inside_a_text(name, token, expected):
    assert BUILT[name].token_bytes(TOKENS.index(token)) == expected


def test_text_to_strip_at_the_end_is_held_back():
    strip = decoders.Sequence([decoders.Fuse(), decoders.Strip("b", 0, 2)])
    detokenizer = build(strip).detokenizer()
    deltas = [detokenizer.push([TOKENS.index(token)]) for token in ("he", "b", "b", "b", "a", "b")]
    assert [*deltas, detokenizer.flush()] == ["he", "", "", "b", "bba", "", ""]


def test_an_unfinished_character_waits():
    detokenizer = BUILT["word ends after bytes"].detokenizer()
    deltas = [detokenizer.push([TOKENS.index(token)]) for token in ("a", "\u00e9", "</w>")]
    assert [*deltas, detokenizer.flush()] == ["a", "", "\ufffd ", ""]


def test_forks_part_inside_a_character():
    detokenizer = BUILT["word ends after bytes"].detokenizer()
    detokenizer.push([TOKENS.index("\u00e9")])
    twin = detokenizer.fork()
    assert (twin.flush(), twin.flush(), detokenizer.flush()) == ("\ufffd", "", "\ufffd")


def test_a_word_that_ends_inside_the_last_token_is_whole():
    detokenizer = BUILT["word ends"].detokenizer()
    ids = [TOKENS.index(token) for token in ("y</w>z", "x</w>", "y</w>z")]
    assert [*(detokenizer.push([id]) for id in ids), detokenizer.flush()] == ["y", " zx", " y", "z"]


def test_orphan_bytes_are_dropped_at_the_start_only():
    tokenizer = build(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), ["<0x80>"])
    orphan = tokenizer._backend.token_to_id("<0x80>")
    assert tokenizer.decode([orphan, 1, orphan]) == "##llo\ufffd"
    assert tokenizer.token_bytes(orphan) == b"\x80"
