"""Counts and marks by master row, whoever is raised or set in whatever order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mstar.conductor.row_counts import RowCounts, RowFlags, RowMarks

CAPACITY = 5
SETS = [np.array(rows, np.int64) for rows in ([0, 1, 2], [2, 4], [], [3], [0, 1, 2])]


RAISE = st.sampled_from(range(len(SETS)))
WRITE = st.tuples(st.integers(0, CAPACITY - 1), st.integers(0, 9))
LOOK = st.none()


@given(st.lists(RAISE | WRITE | LOOK))
def test_deferred_sums_are_those_of_adding_at_once(actions):
    counts, expected = RowCounts(CAPACITY), np.zeros(CAPACITY, np.int64)
    for action in actions:
        if isinstance(action, int):
            counts.raise_by_one(SETS[action])
            expected[SETS[action]] += 1
        elif isinstance(action, tuple):
            counts.values[action[0]] = expected[action[0]] = action[1]
        else:
            assert counts.values.tolist() == expected.tolist()
    assert counts.values.tolist() == expected.tolist()


@given(st.lists(st.tuples(RAISE, st.integers(0, 9)) | st.tuples(st.just("write"), WRITE) | LOOK))
def test_deferred_marks_are_those_of_setting_at_once(actions):
    marks, expected = RowMarks(CAPACITY), np.full(CAPACITY, -1, np.int64)
    for action in actions:
        if action is None:
            assert marks.values.tolist() == expected.tolist()
        elif action[0] == "write":
            row, mark = action[1]
            marks.values[row] = expected[row] = mark
        else:
            marks.set(SETS[action[0]], action[1])
            expected[SETS[action[0]]] = action[1]
    assert marks.values.tolist() == expected.tolist()


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans())))
def test_the_count_of_flags_is_that_of_those_that_are_true(writes):
    flags = RowFlags(8)
    for row, value in writes:
        flags.write(row, value)
        assert flags.values[row] == value
        assert flags.count == flags.values.sum()
