from __future__ import annotations

import pytest

from mstar.engine.accelerator_graph_backend import CapturedGraph, CpuGraphBackend
from mstar.engine.batch import Batch
from mstar.engine.capture_memory import CaptureBudget, MemoryUse
from mstar.engine.resources.step import BucketKey

from .toy import ToyOptions, expected, generate, make_engine, request

GIB = 1 << 30


class Device:
    """``free`` bytes; a forward, given as a number of GiB, takes that much and is peak and reserve at once."""

    budgets_memory = True

    def __init__(self, free: float) -> None:
        self.free = int(free * GIB)

    def measure(self, forward):
        taken = int(forward() * GIB)
        return MemoryUse(taken, taken)

    def free_memory(self):
        return self.free


def capture(budget, device, sizes, runner):
    """What a runner captures of ``sizes`` in order."""
    captured = []
    for size in sizes:
        if budget.allows((runner, size)):
            captured.append(size)
            device.free -= int(size * GIB)
    return captured


def measured(device, *runners):
    budget = CaptureBudget(device)
    for runner, sizes in runners:
        for size in sizes:
            budget.measure((runner, size), lambda size=size: size)
    return budget


def test_a_bucket_that_would_leave_less_than_the_floor_is_skipped_and_a_smaller_one_may_fit():
    device = Device(6.5)
    budget = measured(device, ("a", [4, 2, 1, 0.5]))
    assert budget.floor == 4 * GIB
    assert capture(budget, device, [4, 2, 1, 0.5], "a") == [2, 0.5]


def test_the_floor_is_the_largest_peak_of_any_runner_and_the_second_sees_the_remainder():
    device = Device(8)
    budget = measured(device, ("a", [2, 1]), ("b", [3, 2, 1]))
    assert budget.floor == 3 * GIB
    assert capture(budget, device, [2, 1], "a") == [2, 1]
    assert capture(budget, device, [3, 2, 1], "b") == [2]


def test_what_exactly_fits_is_captured():
    device = Device(4)
    budget = measured(device, ("a", [2]))
    assert capture(budget, device, [2], "a") == [2]


def test_each_bucket_is_measured_once():
    runs = []
    budget = CaptureBudget(Device(8))
    for _ in range(3):
        budget.measure("bucket", lambda: runs.append(1) or 1.0)
    assert len(runs) == 1


def test_a_bucket_that_was_never_measured_is_allowed():
    assert CaptureBudget(Device(0)).allows("unknown")


def test_without_a_budget_nothing_is_run_and_no_driver_is_asked():
    budget = CaptureBudget(CpuGraphBackend())
    assert not budget.is_limited
    budget.measure("bucket", lambda: pytest.fail("ran"))
    assert budget.allows("bucket")


class SmallDevice(CpuGraphBackend):
    """A CPU that claims ``free`` bytes, of which a forward takes one per token of its bucket."""

    budgets_memory = True

    def __init__(self, free: int) -> None:
        super().__init__(warmup_forwards=2, capture_at_load=True, replays_real_head=False, strict=True)
        self.free = free
        self.log: list[tuple[str, int]] = []

    def measure(self, forward):
        taken = self.tokens = forward().check_stop_buffers["new_token"].numel()
        self.log.append(("measure", taken))
        return MemoryUse(taken, taken)

    def free_memory(self) -> int:
        return self.free

    def capture(self, forward, tensors, bs, pool=None) -> CapturedGraph:
        self.log.append(("capture", bs))
        self.free -= bs
        return super().capture(forward, tensors, bs, pool)


def test_a_runner_measures_all_buckets_before_it_captures_any_and_drops_what_is_over_the_floor(caplog):
    backend = SmallDevice(free=18)
    engine, submodule, toy = make_engine(ToyOptions(prefill_sizes=(1,), prefill_tokens=(16,)), backend=backend)
    assert [n for what, n in backend.log if what == "measure"] == [8, 4, 2, 1, 1]
    assert [what for what, _ in backend.log].index("capture") == 5
    # 8 rows leave 10, 2 for its second slot; 4 would leave 6 of the floor of 8 and is not tried, nor are the others.
    assert [n for what, n in backend.log if what == "capture"] == [8, 8]
    assert engine.dropped_buckets() == {"LLM": 4}
    assert "not captured" in caplog.text
    assert "captured 1 of 5 buckets" in caplog.text
    assert not toy.length.any()
    info = request(0, [1, 2])
    engine.ingest(info)
    assert generate(engine, [info], 3) == {0: expected([1, 2], 3)}
    assert engine.exec(Batch("LLM", "decode", [info])).bucket == BucketKey("decode", 8, 8)
    assert engine.eager_steps == {("LLM", "prefill", "dropped"): 1}
    assert submodule.forwards > 5
