"""Text cut at stop strings, whatever the tokens look like and however they arrive."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.text.stream import TextStream

from .conftest import spell


def run(tokenizer, pushes, stop, **options):
    """Deltas (the last from finish), and the stream."""
    stream = TextStream(tokenizer, stop, **options)
    return [*(stream.push(ids) for ids in pushes), stream.finish()], stream


def tokens(tokenizer, *texts):
    """Ids of tokens that the fixture's vocabulary holds as wholes, as if forced on the model."""
    return [tokenizer._backend.token_to_id(spell(text.encode())) for text in texts]


def one_by_token(tokenizer, *texts):
    return [[id] for id in tokens(tokenizer, *texts)]


def reference(tokenizer, ids, stop, skip):
    """The rule by brute force: text before the first completed match, the match, the token that completed it."""
    stop = [s for s in stop if s]
    whole = tokenizer.decode(ids, skip)
    ends = [(whole.find(s) + len(s), -len(s), s) for s in stop if s in whole]
    if not ends:
        return whole, None, len(ids)
    end, _, matched = min(ends)
    for count in range(1, len(ids) + 1):
        detokenizer = tokenizer.detokenizer(skip)
        if len(detokenizer.push(ids[:count])) >= end:
            break
    return whole[: end - len(matched)], matched, count


IDS = st.lists(st.sampled_from([*b"ab. \n", 0xC3, 0xA9, 0xF0, 0x9F, 256, 257]), max_size=24)
STOPS = st.lists(st.text(alphabet="ab. \n\u00e9\ufffd", max_size=4), max_size=3)


@settings(deadline=None, max_examples=500)
@given(ids=IDS, stop=STOPS, cuts=st.lists(st.integers(0, 24), max_size=5), skip=st.booleans())
def test_text_match_and_count_follow_the_rule_for_any_split(byte_level, ids, stop, cuts, skip):
    cuts = sorted(min(cut, len(ids)) for cut in cuts)
    pushes = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    expected = reference(byte_level, ids, stop, skip)
    for way in (pushes, [[id] for id in ids], [ids]):
        deltas, stream = run(byte_level, way, stop, skip_special_tokens=skip)
        assert ("".join(deltas), stream.matched_stop, stream.num_tokens) == expected


@settings(deadline=None)
@given(ids=IDS, stop=STOPS.filter(lambda stop: any(stop)))
def test_only_a_beginning_of_a_stop_string_is_held_back(byte_level, ids, stop):
    stream = TextStream(byte_level, stop)
    sent = ""
    for count, id in enumerate(ids, start=1):
        sent += stream.push([id])
        if stream.matched_stop is not None:
            return
        complete = byte_level.detokenizer().push(ids[:count])
        held = complete[len(sent) :]
        assert complete.startswith(sent)
        assert held == "" or any(s.startswith(held) and s != held for s in stop)


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
