"""Places of a pool: lent, released and lent again, and what is asked of them done in that order."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.sampler.pool import RowPool

ROWS, WIDTH = 30, 6


def pool(width=WIDTH):
    return RowPool(ROWS, width, torch.bool, 0)


def met(made, row):
    made.settle()
    return np.flatnonzero(made.host[made.address[row]]).tolist()


def test_a_place_is_its_rows_alone_and_empty_at_first():
    made = pool()
    for row in range(ROWS):
        made.lend(row, afresh=True)
        made.mark(row, np.array([row % WIDTH]))
    assert sorted(made.address[:ROWS]) == list(range(1, ROWS + 1)), "place 0 is nobody's"
    assert [met(made, row) for row in range(ROWS)] == [[row % WIDTH] for row in range(ROWS)]


def test_a_released_place_is_lent_again_clean_whatever_its_last_owner_still_asked_for():
    made = pool()
    made.lend(3, afresh=True)
    place = made.address[3]
    made.settle()
    made.mark(3, np.array([1, 2]))
    made.release(3)
    assert made.address[3] == 0
    made.lend(7, afresh=True)
    assert made.address[7] == place
    made.mark(7, np.array([4]))
    assert met(made, 7) == [4]


def test_a_row_keeps_what_it_has_unless_it_starts_afresh():
    made = pool()
    made.lend(3, afresh=True)
    made.mark(3, np.array([1, 1, -1, WIDTH, WIDTH + 9]))
    made.lend(3, afresh=False)
    assert met(made, 3) == [1], "ids without a column are passed over"
    made.lend(3, afresh=True)
    assert met(made, 3) == []


def test_growing_moves_no_content():
    made = pool()
    made.lend(0, afresh=True)
    made.mark(0, np.array([5]))
    made.settle()
    for row in range(1, ROWS):
        made.lend(row, afresh=True)
    assert met(made, 0) == [5]
    assert made.host.shape[0] > ROWS


def test_a_width_told_later_brings_what_waited_for_it():
    made = pool(width=None)
    made.lend(2, afresh=True)
    made.mark(2, np.array([3, 8]))
    made.settle()
    assert made.host.size == 0
    made.open(5)
    assert met(made, 2) == [3]
    with pytest.raises(ValueError, match="width of the logits, 6, got 5"):
        made.open(6)


def test_rows_without_a_place_have_nothing_to_release_or_mark():
    made = pool()
    made.release(4)
    made.mark(4, np.array([1]))
    made.settle()
    assert made.host.size == 0
