"""What captures cost is added up by bucket and told at load."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from mstar.engine.capture_costs import CaptureCosts
from mstar.engine.resources.step import BucketKey

SMALL, LARGE = BucketKey("decode", 1, 1), BucketKey("decode", 8, 8)


@dataclass
class Backend:
    capture_at_load: bool = True
    budgets_memory: bool = True
    free: list[int] = field(default_factory=list)

    def free_memory(self) -> int:
        return self.free.pop(0)


def test_slots_of_a_bucket_are_added_up_and_a_line_tells_each_bucket(caplog) -> None:
    caplog.set_level(logging.INFO)
    costs = CaptureCosts(Backend(free=[100_000_000, 97_000_000, 96_000_000, 96_000_000]))
    for key in (LARGE, LARGE, SMALL):
        with costs.of(key):
            pass
    assert list(costs.by_bucket) == [LARGE, SMALL]
    assert (costs.by_bucket[LARGE].slots, costs.by_bucket[LARGE].bytes) == (2, 4_000_000)
    assert (costs.by_bucket[SMALL].slots, costs.by_bucket[SMALL].bytes) == (1, 0)
    costs.tell("LLM")
    lines = caplog.messages
    assert f"{LARGE}: 2 slots in 0.00 s, 4.0 MB" in lines[0]
    assert lines[-1] == "LLM: captured 2 buckets in 0.0 s, 4.0 MB"


def test_where_the_first_replay_captures_there_is_nothing_to_tell(caplog) -> None:
    caplog.set_level(logging.INFO)
    costs = CaptureCosts(Backend(capture_at_load=False))
    with costs.of(SMALL):
        pass
    costs.tell("LLM")
    assert not costs.by_bucket
    assert not caplog.messages


def test_a_device_that_budgets_no_memory_is_asked_for_none() -> None:
    costs = CaptureCosts(Backend(budgets_memory=False))
    with costs.of(SMALL):
        pass
    assert costs.by_bucket[SMALL].bytes == 0
