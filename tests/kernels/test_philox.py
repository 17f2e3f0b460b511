"""Philox words: fixed vectors, and one word per element whatever stands beside it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from philox_vectors import WORDS

from mstar.kernels.philox import philox_words


def philox_in_python(seed, offset, token):
    """Philox4x32-10 straight from the paper, in Python integers."""
    mask = 2**32 - 1
    seed, offset = seed % 2**64, offset % 2**64
    c = [offset & mask, offset >> 32, token, 0]
    k = [seed & mask, seed >> 32]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0]


@pytest.mark.parametrize(("seed", "offset", "token", "word"), WORDS)
def test_known_words(seed, offset, token, word):
    assert philox_words(np.array([seed]), np.array([offset]), np.array([token])).tolist() == [word]


def test_known_words_side_by_side():
    seed, offset, token, words = (list(column) for column in zip(*WORDS, strict=True))
    assert philox_words(np.array(seed), np.array(offset), np.array(token)).tolist() == words


@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1)),
        min_size=1,
        max_size=20,
    )
)
def test_equals_the_definition(rows):
    seed, offset, token = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    assert philox_words(seed, offset, token).tolist() == [philox_in_python(*row) for row in rows]


def test_arguments_are_left_alone():
    arguments = [np.array([3, 4], np.uint64) for _ in range(3)]
    philox_words(*arguments)
    assert all(a.tolist() == [3, 4] for a in arguments)
