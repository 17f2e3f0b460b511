"""Text cut at stop strings, whatever the tokens look like and however they arrive."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.text.matching import common_length
from mstar.text.stream import TextStream

from .conftest import WORDS, spell


def run(tokenizer, pushes, stop, **options):
    """Deltas (the last from finish), and the stream."""
    stream = TextStream(tokenizer, stop, **options)
    return [*(stream.push(ids) for ids in pushes), stream.finish()], stream


def tokens(tokenizer, *texts):
    """Ids of tokens that the fixture's vocabulary holds as wholes, as if forced on the model."""
    return [tokenizer._backend.token_to_id(spell(text.encode())) for text in texts]


def one_by_token(tokenizer, *texts):
    return [[id] for id in tokens(tokenizer, *texts)]


# Whatever unfinished character a text ends with, one of these bytes completes it or shows it to be none.
ENDINGS = [head + tail for head in (b"", b"\x80", b"\x90", b"\xa0") for tail in (b"x", b"\x80", b"\x80\x80")]


def settled(tokenizer, ids, skip):
    """Text of ``ids`` that no later token changes: what the one-shot decodes of its continuations agree on."""
    texts = [tokenizer.decode([*ids, *more], skip) for more in ([], *continuations(tokenizer))]
    return texts[0][: min(common_length(texts[0], text) for text in texts)]


def reference(tokenizer, ids, stop, skip, min_tokens, include_stop):
    """The rule by brute force: the text, the match that ended it, the tokens it took."""
    whole = tokenizer.decode(ids, skip)
    settled_at = [len(settled(tokenizer, ids[:count], skip)) for count in range(len(ids))] + [len(whole)]
    if len(ids) > min_tokens:
        for end in range(settled_at[min_tokens] + 1, len(whole) + 1):
            for start in range(settled_at[min_tokens], end):  # leftmost first
                if whole[start:end] in stop:
                    count = next(count for count, length in enumerate(settled_at) if length >= end)
                    return whole[: end if include_stop else start], whole[start:end], count
    return whole, None, len(ids)


def pieces_of(draw, ids):
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    return [ids[a:b] for a, b in pairwise([0, *cuts, len(ids)])]


VOCABULARIES = {
    "byte_level": [*b"ab. \n", 0xC3, 0xA9, 0xF0, 0x9F, 0xAB, 0xA0, 256, 257],
    "sentencepiece": [*(3 + byte for byte in b"a\n\xc3\xa9\xf0\x9f\xab\xa0"), *range(259, 275), 0, 1],
    "wordpiece": range(len(WORDS) + 2),
    "smollm2": [*range(0, 49152, 97), *range(260), *range(260, 400)],
}


@cache
def continuations(tokenizer):
    """Ids of ENDINGS; for a vocabulary without bytes, of another word."""
    ids = {piece: id for id, piece in enumerate(tokenizer.all_pieces()) if len(piece) == 1}
    return [[ids[bytes([byte])] for byte in ending] for ending in ENDINGS] if b"\x80" in ids else [[WORDS.index("he")]]


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_text_match_and_count_follow_the_rule_for_any_split(request, name, data):
    tokenizer = request.getfixturevalue(name)
    ids = data.draw(st.lists(st.sampled_from(VOCABULARIES[name]), max_size=16))
    skip, include_stop = data.draw(st.booleans()), data.draw(st.booleans())
    min_tokens = data.draw(st.integers(0, 6))
    whole = tokenizer.decode(ids, skip)
    places = st.tuples(st.integers(0, len(whole)), st.integers(1, 5))
    occurring = places.map(lambda place: whole[place[0] : sum(place)])
    stop = data.draw(st.lists(occurring | st.text("ab. \n\u00e9\ufffd", max_size=4), max_size=3))
    expected = reference(tokenizer, ids, set(stop) - {""}, skip, min_tokens, include_stop)
    options = {"skip_special_tokens": skip, "min_tokens": min_tokens, "include_stop": include_stop}
    for pushes in (pieces_of(data.draw, ids), [[id] for id in ids], [ids], [np.array(ids, np.int32)]):
        deltas, stream = run(tokenizer, pushes, stop, **options)
        assert ("".join(deltas), stream.matched_stop, stream.num_tokens) == expected


IDS = st.lists(st.sampled_from(VOCABULARIES["byte_level"]), max_size=24)
STOPS = st.lists(st.text(alphabet="ab. \n\u00e9\ufffd", max_size=4), max_size=3)


@settings(deadline=None)
@given(ids=IDS, stop=STOPS.filter(any), min_tokens=st.integers(0, 6), include_stop=st.booleans())
def test_only_a_beginning_of_a_stop_string_is_held_back(byte_level, ids, stop, min_tokens, include_stop):
    stream = TextStream(byte_level, stop, min_tokens=min_tokens, include_stop=include_stop)
    sent = ""
    for count, id in enumerate(ids, start=1):
        sent += stream.push([id])
        if stream.matched_stop is not None:
            return
        complete = byte_level.detokenizer().push(ids[:count])
        held = complete[len(sent) :]
        assert complete.startswith(sent)
        assert held == "" or any(s.startswith(held) and s != held for s in stop)
        if count <= min_tokens or include_stop:
            assert held == ""


def test_stop_strings_are_not_looked_at_before_min_tokens(byte_level):
    """The text of the first 20 tokens never matches, neither wholly nor as the beginning of a match."""
    ids = [*b"a\n", *b"x" * 16, *b".\n", *b"\n..\nb\n"]
    deltas, stream = run(byte_level, [[id] for id in ids], ["\n..\nb", "\n\n", ".\n\n", "b\n"], min_tokens=20)
    assert deltas[:20] == [chr(id) for id in ids[:20]]
    assert ("".join(deltas), stream.matched_stop, stream.num_tokens) == ("a\n" + "x" * 16 + ".\n", "\n..\nb", 25)


@pytest.mark.parametrize(("num_tokens", "text"), [(20, "x" * 20), (21, "x" * 20)])
def test_the_token_after_min_tokens_is_the_first_that_can_match(byte_level, num_tokens, text):
    deltas, stream = run(byte_level, [b"x" * num_tokens], ["x"], min_tokens=20)
    assert ("".join(deltas), stream.num_tokens) == (text, num_tokens)
    assert stream.matched_stop == (None if num_tokens == 20 else "x")


def test_a_character_begun_before_min_tokens_counts_where_it_is_complete(byte_level):
    deltas, stream = run(byte_level, [[97, 0xC3], [0xA9, 98]], ["\u00e9"], min_tokens=2)
    assert ("".join(deltas), stream.matched_stop, stream.num_tokens) == ("a", "\u00e9", 3)


def test_an_unfinished_character_of_the_first_tokens_is_no_match(byte_level):
    deltas, stream = run(byte_level, [[97, 0xC3]], ["\ufffd"], min_tokens=2)
    assert ("".join(deltas), stream.matched_stop) == ("a\ufffd", None)


def test_the_stop_string_can_be_part_of_the_text(byte_level):
    ids = one_by_token(byte_level, "ABC ", "DEF", "G", "HI", "J")
    deltas, stream = run(byte_level, ids, ["DEFGH"], include_stop=True)
    assert deltas == ["ABC ", "DEF", "G", "H", "", ""]
    assert (stream.matched_stop, stream.num_tokens) == ("DEFGH", 4)


def test_stop_string_over_several_tokens_never_leaks(byte_level):
    deltas, stream = run(byte_level, one_by_token(byte_level, "ABC ", "DEF", "G", "HI", "J"), ["DEFGHIJ"])
    assert deltas == ["ABC ", "", "", "", "", ""]
    assert (stream.matched_stop, stream.num_tokens) == ("DEFGHIJ", 5)


def test_held_text_is_released_when_the_match_became_impossible(byte_level):
    deltas, stream = run(byte_level, one_by_token(byte_level, "ABC ", "DEF", "G", "HI", "K"), ["DEFGHIJ"])
    assert deltas == ["ABC ", "", "", "", "DEFGHIK", ""]
    assert stream.matched_stop is None


def test_held_text_is_released_at_the_end(byte_level):
    deltas, stream = run(byte_level, one_by_token(byte_level, "ABC ", "DEF"), ["DEFGHIJ"])
    assert deltas == ["ABC ", "", "DEF"]
    assert (stream.matched_stop, stream.num_tokens) == (None, 2)


def test_match_may_end_inside_a_token(byte_level):
    ids = tokens(byte_level, "\n", "Observ", "ation: x")
    for pushes in ([[id] for id in ids], [ids]):
        deltas, stream = run(byte_level, pushes, ["\nObs"])
        assert "".join(deltas) == ""
        assert (stream.matched_stop, stream.num_tokens) == ("\nObs", 2)


def test_tokens_after_a_match_that_an_earlier_push_began_do_not_count(byte_level):
    deltas, stream = run(byte_level, [list(b"xab"), list(b"cdef")], ["abc"])
    assert ("".join(deltas), stream.num_tokens) == ("x", 4)


def test_pushes_after_the_match_are_ignored(byte_level):
    stream = TextStream(byte_level, ["b"])
    assert stream.push([97, 98, 99]) == "a"
    assert stream.push([100]) == ""
    assert (stream.finish(), stream.num_tokens) == ("", 2)


def test_first_completed_stop_string_wins_and_the_longest_of_equals(byte_level):
    _, stream = run(byte_level, [list(b"x STOP y END")], ["END", "STOP"])
    assert stream.matched_stop == "STOP"
    deltas, stream = run(byte_level, [list(b"xabc")], ["c", "abc", "bc"])
    assert (deltas[0], stream.matched_stop) == ("x", "abc")


def test_without_stop_strings_only_tokens_are_counted(byte_level):
    deltas, stream = run(byte_level, [[97, 98], [99]], [])
    assert (deltas, stream.num_tokens, stream.matched_stop) == (["ab", "c", ""], 3, None)


def test_unfinished_character_follows_held_text(byte_level):
    deltas, _ = run(byte_level, [[97], [0xF0, 0x9F]], ["ab"])
    assert deltas == ["", "", "a\ufffd"]


def test_special_tokens_can_be_a_stop_string_where_they_are_shown(byte_level):
    ids = [97, 256, 98]
    assert "".join(run(byte_level, [ids], ["<|end|>"])[0]) == "ab"
    assert "".join(run(byte_level, [ids], ["<|end|>"], skip_special_tokens=False)[0]) == "a"
