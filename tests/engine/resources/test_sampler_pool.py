"""Places of a pool: lent, released and lent again, and what is asked of them done in that order."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.sampler.pool import RowPool

ROWS, WIDTH = 30, 6


def pool(on_host=True, width=WIDTH, most=ROWS):
    return RowPool(ROWS, most, width, torch.bool, 0, torch.device("cpu"), on_host)


def met(made, row):
    made.settle()
    assert made.host is None or np.shares_memory(made.host, made.data.numpy())
    return torch.nonzero(made.data[made.place[row]]).flatten().tolist()


BOTH = pytest.mark.parametrize("on_host", [True, False])


@BOTH
def test_a_place_is_its_rows_alone_and_empty_at_first(on_host):
    made = pool(on_host)
    for row in range(ROWS):
        made.lend(row, afresh=True)
        made.mark(row, np.array([row % WIDTH]))
    assert sorted(made.place[:ROWS]) == list(range(1, ROWS + 1)), "place 0 is nobody's"
    assert [met(made, row) for row in range(ROWS)] == [[row % WIDTH] for row in range(ROWS)]


@BOTH
def test_a_released_place_is_lent_again_clean_whatever_its_last_owner_still_asked_for(on_host):
    made = pool(on_host)
    made.lend(3, afresh=True)
    place = made.place[3]
    made.settle()
    made.mark(3, np.array([1, 2]))
    made.release(3)
    assert made.place[3] == 0
    made.lend(7, afresh=True)
    assert made.place[7] == place
    made.mark(7, np.array([4]))
    assert met(made, 7) == [4]


@BOTH
def test_a_row_keeps_what_it_has_unless_it_starts_afresh(on_host):
    made = pool(on_host)
    made.lend(3, afresh=True)
    made.mark(3, np.array([1, 1, -1, WIDTH, WIDTH + 9]))
    made.lend(3, afresh=False)
    assert met(made, 3) == [1], "ids without a column are passed over"
    made.lend(3, afresh=True)
    assert met(made, 3) == []


def test_growing_moves_no_content_and_a_device_never_moves_its_memory():
    for on_host in (True, False):
        made = pool(on_host)
        made.lend(0, afresh=True)
        made.mark(0, np.array([5]))
        made.settle()
        address = made.data.data_ptr()
        for row in range(1, ROWS):
            made.lend(row, afresh=True)
        assert met(made, 0) == [5]
        assert made.data.shape[0] > ROWS
        assert on_host or made.data.data_ptr() == address


@BOTH
def test_a_width_told_later_brings_what_waited_for_it(on_host):
    made = pool(on_host, width=None)
    made.lend(2, afresh=True)
    made.mark(2, np.array([3, 8]))
    made.settle()
    assert made.data.numel() == 0
    made.open(5)
    assert met(made, 2) == [3]
    with pytest.raises(ValueError, match="width of the logits, 6, got 5"):
        made.open(6)


def test_rows_without_a_place_have_nothing_to_release_or_mark():
    made = pool()
    made.release(4)
    made.mark(4, np.array([1]))
    made.settle()
    assert made.data.numel() == 0
