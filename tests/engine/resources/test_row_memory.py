"""Tensors of rows that need one: lent, marked, let go, and what waits for a width."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.row_memory import RowMemory

WIDTH = 6


def memory(width=WIDTH):
    return RowMemory(9, width, torch.int32, 0, torch.device("cpu"))


def met(made, row):
    return torch.nonzero(made.of(row)).flatten().tolist()


def test_an_address_is_that_of_a_rows_own_tensor_and_0_without_one():
    made = memory()
    for row in (2, 5):
        made.lend(row)
        made.mark(row, np.array([row, -1, WIDTH]))
    assert np.flatnonzero(made.address).tolist() == [2, 5]
    assert [made.address[row] for row in (2, 5)] == [made.of(row).data_ptr() for row in (2, 5)]
    assert [met(made, row) for row in (2, 5)] == [[2], [5]]
    made.release(2)
    made.release(3)
    assert (made.of(2), made.address[2]) == (None, 0)


def test_a_row_keeps_what_it_has_unless_it_starts_afresh_or_is_lent_again():
    made = memory()
    made.lend(1)
    made.mark(1, np.array([4]))
    made.lend(1)
    assert met(made, 1) == [4]
    before = made.of(1)
    made.lend(1, afresh=True)
    assert met(made, 1) == []
    assert before.tolist()[4] == 1, "what steps in flight still read stays as it is"


def test_a_tensor_of_the_owners_making_is_held_instead():
    made, own = memory(), torch.arange(3)
    made.lend(1)
    made.hold(1, own)
    assert (made.of(1), made.address[1]) == (own, own.data_ptr())


def test_a_width_told_later_brings_what_waited_for_it():
    made = memory(width=None)
    made.lend(2)
    made.mark(2, np.array([3, 8]))
    made.lend(2)
    made.lend(4)
    made.release(4)
    assert not made.address.any()
    made.open(5)
    assert met(made, 2) == [3]
    assert np.flatnonzero(made.address).tolist() == [2]
    with pytest.raises(ValueError, match="width of the logits, 6, got 5"):
        made.open(6)
