"""Step buffers: a leased step's arrays lie where its slot's graphs read them, an eager step's lie anywhere."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import BucketKey, SlotLease

CPU = torch.device("cpu")
LEASES = [SlotLease(slot, BucketKey("decode", 8, 8)) for slot in range(2)]


def values(*numbers):
    return np.array(numbers, np.int64)


@pytest.fixture
def buffer():
    made = StepBuffer(torch.int64, CPU, num_slots=2, fill=9)
    made.reserve(6)
    return made


def test_a_slot_has_one_address_whatever_the_length_and_slots_share_none(buffer):
    short, long = buffer.put(values(1), LEASES[0]), buffer.put(values(1, 2, 3), LEASES[0])
    assert short.data_ptr() == long.data_ptr()
    assert buffer.put(values(4), LEASES[1]).data_ptr() != long.data_ptr()
    assert long.tolist() == [1, 2, 3]


def test_buckets_of_a_slot_share_its_buffer(buffer):
    other = SlotLease(0, BucketKey("prefill", 1, 64))
    assert buffer.put(values(1), other).data_ptr() == buffer.put(values(1), LEASES[0]).data_ptr()


def test_the_tail_keeps_its_old_contents(buffer):
    buffer.put(values(1, 2, 3, 4), LEASES[0])
    buffer.put(values(7, 8), LEASES[0])
    assert buffer.view(6, LEASES[0]).tolist() == [7, 8, 3, 4, 9, 9]


def test_an_eager_step_gets_a_tensor_of_its_own(buffer):
    first, second = buffer.put(values(1), None), buffer.put(values(2), None)
    assert (first.tolist(), second.tolist()) == ([1], [2])
    assert buffer.view(6, LEASES[0]).tolist() == [9] * 6


@pytest.mark.parametrize("given", [values(5, 6), torch.tensor([5, 6])], ids=["host", "device"])
def test_a_head_is_written_and_the_whole_length_returned(buffer, given):
    whole = buffer.put_head(given, 4, LEASES[0])
    assert whole.tolist() == [5, 6, 9, 9]
    assert whole.data_ptr() == buffer.view(1, LEASES[0]).data_ptr()


def test_values_take_the_buffers_type(buffer):
    assert buffer.put(np.array([1], np.int32), None).dtype == torch.int64
    assert buffer.put(np.array([1], np.int32), LEASES[0]).dtype == torch.int64


def test_a_buffer_only_grows(buffer):
    before = buffer.view(6, LEASES[0]).data_ptr()
    buffer.reserve(3)
    assert buffer.view(6, LEASES[0]).data_ptr() == before
    buffer.reserve(8)
    assert buffer.view(8, LEASES[0]).tolist() == [9] * 8
    assert buffer.put(values(*range(8)), LEASES[0]).tolist() == list(range(8))


def test_what_a_plan_writes_into_a_view_itself_is_what_the_device_gets(buffer):
    view = buffer.static(4, LEASES[1])
    low, high = view.host_halves
    low[...], high[...] = 1, 2
    assert view.sent().tolist() == [1, 1, 2, 2]
    assert [half.tolist() for half in view.halves] == [[1, 1], [2, 2]]
    assert buffer.static(4, LEASES[1]) is view, "one view per slot and length"


def test_any_number_of_lengths_may_be_asked_for():
    buffer = StepBuffer(torch.int64, CPU, num_slots=1)
    buffer.reserve(2000)
    for n in range(1, 2000, 3):
        assert buffer.put(np.arange(n), LEASES[0]).numel() == n
