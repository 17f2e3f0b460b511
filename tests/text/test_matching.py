"""Where one text begins inside another."""

import pytest

from mstar.text.matching import beginning_length, common_length


@pytest.mark.parametrize(
    ("text", "whole", "length"),
    [("", "ab", 0), ("xa", "ab", 1), ("xab", "ab", 0), ("ab", "ab", 0), ("aab", "abc", 2), ("aaa", "aaaa", 3),
     ("abab", "ababc", 4), ("abax", "aba", 0), ("aba", "abab", 3), ("xaba", "aba", 1)],
)  # fmt: skip
def test_the_longest_end_that_begins_the_whole_but_is_not_all_of_it(text, whole, length):
    assert beginning_length(text, whole) == length


@pytest.mark.parametrize(("one", "other", "length"), [("", "a", 0), ("ab", "abc", 2), ("abd", "abc", 2), ("b", "a", 0)])
def test_what_two_texts_have_in_common_at_the_start(one, other, length):
    assert common_length(one, other) == common_length(other, one) == length
