"""What was made for a batch's composition is found again while its rows, what tells it apart, and its version hold."""

import numpy as np
import pytest

from mstar.engine.resources.compositions import Compositions


def kept():
    compositions = Compositions()
    assert compositions.keep("made", 3, np.array([4, 7]), (1, 2), None) == "made"
    return compositions


def test_equal_rows_are_as_good_as_the_same_ones():
    assert kept().find(3, np.array([4, 7]), (1, 2), None) == "made"


@pytest.mark.parametrize(
    ("version", "rows", "others"),
    [
        (4, [4, 7], ((1, 2), None)),
        (3, [7, 4], ((1, 2), None)),
        (3, [4, 7, 7], ((1, 2), None)),
        (3, [4, 7], ((2, 1), None)),
        (3, [4, 7], ((1, 2), frozenset())),
        (3, [4, 7], ((1, 2),)),
    ],
)
def test_another_composition_is_not_found(version, rows, others):
    assert kept().find(version, np.array(rows), *others) is None


def test_the_last_four_take_turns_and_the_oldest_goes():
    compositions = Compositions()
    for row in range(5):
        compositions.keep(row, 0, np.array([row]))
    assert [compositions.find(0, np.array([row])) for row in range(5)] == [None, 1, 2, 3, 4]
