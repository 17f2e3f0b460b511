"""Columns of a step: where they lie, and that each keeps its own values."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.columns import StepColumns
from mstar.engine.resources.step import BucketKey, SlotLease

DTYPES = {"few": torch.int32, "many": torch.int64, "real": torch.float32}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def columns(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    made = StepColumns(DTYPES, torch.device(request.param), num_slots=2)
    made.reserve(5)
    return made


def values(rows, start=0):
    return {name: np.arange(start, start + rows) for name in DTYPES}


def lease(slot):
    return SlotLease(slot, BucketKey("decode", 5, 5))


@pytest.mark.parametrize("slot", [None, 0, 1])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_each_column_holds_its_values_in_its_dtype(columns, slot, rows):
    sent = columns.put(values(rows, 7), None if slot is None else lease(slot))
    assert {name: (column.dtype, column.tolist()) for name, column in sent.items()} == {
        name: (dtype, list(range(7, 7 + rows))) for name, dtype in DTYPES.items()
    }


def test_a_slots_columns_stay_at_their_addresses_and_eager_ones_are_their_own(columns):
    first = columns.put(values(5), lease(0))
    other, eager = columns.put(values(2, 50), lease(1)), columns.put(values(2, 70), None)
    again = columns.put(values(2, 30), lease(0))
    assert [column.data_ptr() for column in again.values()] == [column.data_ptr() for column in first.values()]
    assert first["many"].tolist() == [30, 31, 2, 3, 4]
    assert (other["few"].tolist(), eager["few"].tolist()) == ([50, 51], [70, 71])


@pytest.mark.parametrize("slot", [None, 0])
def test_columns_of_any_number_of_rows_are_aligned_alike(columns, slot):
    base = columns.put(values(1), lease(0))["few"].data_ptr() % 16
    for rows in (1, 2, 3, 5):
        sent = columns.put(values(rows), None if slot is None else lease(slot))
        assert {column.data_ptr() % 16 for column in sent.values()} == {base}
