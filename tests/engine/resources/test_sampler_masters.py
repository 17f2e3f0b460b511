"""Draw state by master row: where a step's rows read and write, and that the masters stay where they are."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.sampler.masters import DrawMasters
from mstar.engine.resources.step import BucketKey, SlotLease

ROWS = np.array([4, 0, 2, 9, 9], np.int64)
IDS = (11, 12, 13)
TRASH = 6


def lease(slot):
    return SlotLease(slot, BucketKey("decode", ROWS.size, ROWS.size))


@pytest.fixture
def masters():
    made = DrawMasters(TRASH, torch.device("cpu"), num_slots=2)
    made.reserve(8)
    return made


@pytest.mark.parametrize("slot", [None, 0, 1])
@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (None, [4, 0, 2]),
        (frozenset(IDS), [4, 0, 2]),
        (frozenset({12}), [TRASH, 0, TRASH]),
        (frozenset(), [TRASH] * 3),
        (frozenset({11, 99}), [4, TRASH, TRASH]),
    ],
)
def test_padding_and_dropped_rows_address_the_trash_row(masters, slot, kept, expected):
    addressed, index = masters.target(ROWS, IDS, kept, None if slot is None else lease(slot))
    assert addressed.tolist() == index.tolist() == [*expected, TRASH, TRASH]
    assert ROWS.tolist() == [4, 0, 2, 9, 9], "the engine's array is left alone"


def test_a_slots_index_row_keeps_its_address_and_other_slots_have_their_own(masters):
    first, second = (masters.target(ROWS, IDS, None, lease(slot))[1] for slot in (0, 1))
    again = masters.target(ROWS[[1, 0, 2, 3, 4]], IDS, None, lease(0))[1]
    shorter = masters.target(ROWS[:2], IDS[:2], None, lease(0))[1]
    assert first.data_ptr() == again.data_ptr() == shorter.data_ptr() != second.data_ptr()
    assert first[:2].tolist() == shorter.tolist() == [4, 0]
    assert second.tolist() == [4, 0, 2, TRASH, TRASH]


@pytest.mark.parametrize("slot", [None, 0])
def test_a_step_that_differs_in_anything_addresses_rows_of_its_own(masters, slot):
    steps = [(ROWS, IDS, None), (ROWS, IDS, frozenset({12})), (ROWS, IDS[:2], None), (ROWS.copy() + 1, IDS, None)]
    at = None if slot is None else lease(slot)
    for first in steps:
        for step in (first, *steps):
            addressed, index = masters.target(*step, at)
            assert masters.target(*step, at)[1] is index, "an unchanged batch is not sent again"
            expected = [row if rid in (step[2] or IDS) else TRASH for row, rid in zip(step[0], step[1], strict=False)]
            assert index.tolist() == addressed.tolist() == expected + [TRASH] * (ROWS.size - len(expected))


def test_the_masters_never_move(masters):
    addresses = masters.offset.data_ptr(), masters.last_token.data_ptr()
    masters.restart([0, 5])
    _, index = masters.target(ROWS, IDS, None, lease(0))
    masters.scatter(index, torch.arange(5), torch.arange(5) + 10)
    masters.reserve(64)
    assert (masters.offset.data_ptr(), masters.last_token.data_ptr()) == addresses
    assert masters.offset.numel() == masters.last_token.numel() == TRASH + 1


def test_scatter_reaches_the_kept_rows_alone(masters):
    _, index = masters.target(ROWS, IDS, frozenset({11, 13}), lease(0))
    masters.scatter(index, torch.arange(5) + 1, torch.arange(5) + 10)
    assert masters.offset[:TRASH].tolist() == [0, 0, 3, 0, 1, 0]
    assert masters.last_token[:TRASH].tolist() == [0, 0, 12, 0, 10, 0]
    assert masters.last_token[TRASH] in torch.arange(5) + 10


def test_only_what_has_moved_is_put_back(masters):
    _, index = masters.target(ROWS, IDS, None, lease(0))
    masters.scatter(index, torch.tensor([1, 2, 3, 0, 0]), torch.tensor([10, 20, 30, 0, 0]))
    masters.put_back(index, torch.tensor([1, 1, 3, 0, 0]), torch.tensor([11, 21, 31, 0, 0]))
    assert masters.offset[[4, 0, 2]].tolist() == [1, 1, 3]
    assert masters.last_token[[4, 0, 2]].tolist() == [10, 21, 30]
    masters.put_back(index, torch.zeros(5, dtype=torch.int64), None)
    assert masters.last_token[[4, 0, 2]].tolist() == [10, 21, 30]


def test_the_trash_row_starts_at_a_valid_id_and_holds_nothing_else(masters):
    assert masters.last_token[masters.trash_row] == 0
    masters.scatter(torch.tensor([TRASH, TRASH]), torch.tensor([1, 1]), torch.tensor([7, 8]))
    assert masters.last_token[masters.trash_row] in (7, 8)


def test_restarted_rows_have_drawn_nothing(masters):
    masters.scatter(torch.arange(TRASH), torch.full((TRASH,), 3), torch.full((TRASH,), 5))
    masters.restart([1, 4])
    assert masters.offset[:TRASH].tolist() == [3, 0, 3, 3, 0, 3]
    assert masters.last_token[:TRASH].tolist() == [5, 0, 5, 5, 0, 5]
