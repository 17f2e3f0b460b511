"""Index arithmetic over rows of different lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.engine.resources.ragged import indptr, ragged_arange

LENGTHS = st.lists(st.integers(0, 20), max_size=12)


@pytest.mark.parametrize(
    ("lengths", "offsets", "within"),
    [
        ([3, 0, 2], [0, 3, 3, 5], [0, 1, 2, 0, 1]),
        ([1, 1, 1], [0, 1, 2, 3], [0, 0, 0]),
        ([0], [0, 0], []),
        ([], [0], []),
    ],
)
def test_rows_lie_end_to_end(lengths, offsets, within):
    lengths = np.array(lengths, np.int64)
    assert indptr(lengths).tolist() == offsets
    assert ragged_arange(lengths).tolist() == within


@given(LENGTHS)
def test_every_row_counts_from_0(lengths):
    array = np.array(lengths, np.int64)
    assert ragged_arange(array).tolist() == [i for n in lengths for i in range(n)]
    assert indptr(array).dtype == ragged_arange(array).dtype == np.int64
    assert np.diff(indptr(array)).tolist() == lengths
