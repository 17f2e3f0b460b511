"""The ring hands out equal values in buffers it doesn't rewrite while they may be read."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.kv.config import KVStep
from mstar.engine.resources.kv.pinned_ring import START_ELEMENTS, PinnedRing
from mstar.engine.resources.step import Segment, SubmoduleStep

from .drive import Rig

CPU = torch.device("cpu")
KV_ONLY = SubmoduleStep({"kv_cache": KVStep()})


def address(view):
    return view.__array_interface__["data"][0]


def test_values_come_back_as_int32_in_depth_buffers_in_turn():
    ring = PinnedRing(3, CPU)
    views = [ring.take(np.full(5, i, np.int64)) for i in range(6)]
    assert [address(view) for view in views[:3]] == [address(view) for view in views[3:]]
    assert len({address(view) for view in views}) == 3
    assert [view.tolist() for view in views] == [[i] * 5 for i in (3, 4, 5)] * 2
    assert views[0].dtype == np.int32
    assert ring.takes == 6


def test_growth_keeps_old_views_as_they_are():
    ring = PinnedRing(1, CPU)
    old = ring.take(np.arange(4))
    new = ring.take(np.arange(START_ELEMENTS + 1))
    assert new.size == START_ELEMENTS + 1
    assert old.tolist() == [0, 1, 2, 3]
    assert address(ring.take(np.arange(2))) == address(new), "a grown buffer stays"


def test_a_ring_that_gets_deeper_rewrites_nothing_sooner():
    ring = PinnedRing(2, CPU)
    views = [ring.take(np.array([i])) for i in range(2)]
    ring.ensure_depth(4)
    ring.ensure_depth(3)
    assert ring.depth == 4
    ring.take(np.array([8]))
    assert [view.tolist() for view in views] == [[8], [1]]


@pytest.mark.parametrize(("knob", "takes"), [("0", 0), ("1", 4 * 3)])
def test_a_plans_index_arrays_go_through_the_ring(monkeypatch, knob, takes):
    monkeypatch.setenv("MSTAR_KV_PINNED_INDPTRS", knob)
    rig = Rig()
    rig.join(1, 0)
    segments = (Segment(1, "main", 5), Segment(1, "cfg", 2))
    rig.run([1], [5], step=SubmoduleStep({"kv_cache": KVStep()}, segments=segments))
    plan = rig.run([1], [1], lambda rig, ctx: ctx.plan_results["kv_cache"]["main"], step=KV_ONLY)
    assert rig.kv.counters["pinned_takes"] == takes
    assert plan.indptrs.paged_kv_indices.tolist() == rig.kv.page_table[0, :2].tolist()
    assert plan.indptrs.paged_kv_last_page_len.tolist() == [2]
    if takes:
        assert rig.kv._ring.depth == 4 * 2 * 2 + 4


def test_arrays_of_a_cached_plan_are_copied_again_each_step(monkeypatch):
    monkeypatch.setenv("MSTAR_KV_PINNED_INDPTRS", "1")
    monkeypatch.setenv("MSTAR_KV_PLAN_CACHE", "1")
    rig = Rig()
    rig.reserve(4, 4)
    rig.join(1, 0)
    for i in range(30):
        plan = rig.run([1], [1], lambda rig, ctx: ctx.plan_results["kv_cache"]["main"], step=KV_ONLY, slot=i % 2)
        assert plan.indptrs.paged_kv_indptr.tolist() == [0, i // 4 + 1]
        assert plan.indptrs.paged_kv_indices.tolist() == rig.kv.page_table[0, : i // 4 + 1].tolist()
    assert rig.kv.plan_cache_stats["hit"] == 29


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_buffer_waits_for_the_copy_out_of_it():
    device = torch.device("cuda")
    ring = PinnedRing(1, device)
    targets = []
    for i in range(20):
        ring.begin()
        view = torch.from_numpy(ring.take(np.full(1 << 20, i)))
        assert view.is_pinned()
        torch.cuda._sleep(2_000_000)  # the copy is still waiting when the buffer comes round again
        targets.append(torch.empty(1 << 20, dtype=torch.int32, device=device).copy_(view, non_blocking=True))
    assert [int(t.min()) for t in targets] == [int(t.max()) for t in targets] == list(range(20))
