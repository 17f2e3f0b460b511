"""Counters on the device: what is sent, and what the host knows of them."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.device_state import DeviceCounters, DeviceWrites


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device(request.param)


def test_writes_of_any_size_arrive_in_order(device):
    writes, target = DeviceWrites(device), torch.zeros(50, 100, dtype=torch.int32, device=device)
    expected, random = np.zeros(5000, np.int32), np.random.default_rng(0)
    for size in (1, 3, 700, 5, 2000, 1, 1, 1, 1, 512, 513, 9, 4000):
        index = random.permutation(5000)[:size]
        values = random.integers(0, 2**31, size)
        writes.write(target, index, values)
        expected[index] = values
    assert target.view(-1).tolist() == expected.tolist()
    assert writes.count == 13


@pytest.fixture
def counters(device):
    return DeviceCounters(10, device, DeviceWrites(device))


def values(counters):
    return counters.values.tolist()


def test_only_what_the_device_does_not_have_is_sent(counters, monkeypatch):
    sent = []
    write = counters._writes.write
    monkeypatch.setattr(counters._writes, "write", lambda *args: sent.append(args[1].tolist()) or write(*args))
    wanted, streams = np.arange(10) * 5, np.array([4, 0, 2])
    counters.bring(streams, wanted, 1)
    assert values(counters) == [0, 0, 10, 0, 20, 0, 0, 0, 0, 0]
    wanted[2] += 1
    counters.bring(streams, wanted, 2)
    counters.bring(np.array([2, 3]), wanted, 2)
    assert sent == [[4, 2], [2], [3]], "stream 0 is 0 from the start"


def test_a_step_that_moves_them_needs_nothing_sent(counters):
    wanted, streams = np.full(10, 7), np.array([1, 3])
    counters.bring(streams, wanted, 1)
    for epoch in range(1, 4):
        counters.values[[1, 3]] += 1  # the step
        wanted[streams] += 1
        counters.moved(streams, np.array([1, 1]), epoch, epoch + 1)
        before = counters._writes.count
        counters.bring(streams, wanted, epoch + 1)
        counters.bring(streams.copy(), wanted, epoch + 1)
        assert counters._writes.count == before
    assert values(counters)[1] == 10


def test_changes_of_others_are_seen_at_the_next_step(counters):
    wanted, streams = np.full(10, 7), np.array([1, 3])
    counters.bring(streams, wanted, 1)
    counters.values[[1, 3]] += 1
    wanted[:] = [0, 8, 0, 2, 0, 0, 0, 0, 0, 0]  # stream 3 went to another request meanwhile
    counters.moved(streams, np.array([1, 1]), 5, 6)  # by an epoch that was not the last seen
    counters.bring(streams, wanted, 6)
    assert values(counters)[1] == 8
    assert values(counters)[3] == 2


def test_what_is_forgotten_is_sent_whatever_it_was(counters):
    wanted, streams = np.full(10, 7), np.array([1, 3])
    counters.bring(streams, wanted, 1)
    counters.values[3] = 99  # a step came half way
    counters.forget(np.array([3]))
    counters.bring(streams, wanted, 1)
    assert values(counters)[3] == 7


def test_a_write_that_fails_is_repeated(counters, monkeypatch):
    def fail(*args):
        raise RuntimeError("no memory")

    wanted, streams = np.full(10, 7), np.array([1, 3])
    with monkeypatch.context() as patch:
        patch.setattr(counters._writes, "write", fail)
        with pytest.raises(RuntimeError):
            counters.bring(streams, wanted, 1)
    counters.bring(streams, wanted, 1)
    assert values(counters)[1] == values(counters)[3] == 7
