"""Offloaded requests: all labels move together, bit for bit, and never from under a step."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.kv.config import KVReqConfig, KVStep
from mstar.engine.resources.step import AdmitOutcome, RequestOffloading, Segment, SubmoduleStep

from .drive import Rig

KV_ONLY = SubmoduleStep({"kv_cache": KVStep()})


@pytest.fixture
def rig():
    """Request 1 on row 0 holds 6 tokens of "main" and 3 of "cfg", request 2 on row 1 holds 8."""
    rig = Rig(pages=8, cpu_offload_pages=5)
    rig.join(1, 0, kv=KVReqConfig(needed_labels={("LLM", "guided"): ("main", "cfg")}))
    rig.join(2, 1)
    segments = (Segment(1, "main", 6), Segment(1, "cfg", 3))
    rig.run([1], [6], step=SubmoduleStep({"kv_cache": KVStep()}, segments=segments))
    rig.run([2], [8], step=KV_ONLY)
    rig.kv.cache.copy_(torch.randn(rig.kv.cache.shape))
    return rig


def contents(rig, row):
    streams = rig.kv._streams.of_rows(np.array([row]))
    pages = torch.from_numpy(rig.kv._streams.held_pages(streams).astype(np.int64))
    return rig.kv.cache[:, pages].clone(), rig.kv.stored_len[streams].tolist(), rig.kv.num_pages[streams].tolist()


def test_a_request_comes_back_as_it_was(rig):
    before = contents(rig, 0)
    assert rig.kv.supports_eviction
    assert rig.kv.reclaimable(1) == rig.kv.get_offload_priority(1) == 3
    free = rig.kv.free_pages
    assert rig.kv.offload(1)
    assert rig.kv.is_offloaded(1)
    assert rig.kv.free_pages == free + 3
    assert contents(rig, 0)[1:] == ([0, 0], [0, 0])
    rig.kv.cache[:, 1:] = 0
    assert rig.kv.can_reload(1)
    assert rig.kv.reload(1)
    after = contents(rig, 0)
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]
    assert not rig.kv.is_offloaded(1)
    rig.kv.check_pages()
    rig.kv._offloading.pool.check()


def test_a_step_of_an_offloaded_request_is_refused_until_it_is_back(rig):
    assert rig.kv.offload(1)
    outcome = rig.kv.admit(KVStep(), rig.context([2, 1], [1, 1]))
    assert outcome.reason == RequestOffloading(1)
    assert rig.kv.num_pages[1] == 2, "nothing was taken for the others"
    assert rig.kv.admit_retrieve(1, "LLM", "decode", None) == AdmitOutcome()
    assert not rig.kv.is_offloaded(1)
    assert rig.kv.admit(KVStep(), rig.context([2, 1], [1, 1])).ok


def test_retrieving_waits_for_room(rig):
    assert rig.kv.offload(1)
    rig.run([2], [20], step=KV_ONLY)
    assert not rig.kv.can_reload(1)
    assert not rig.kv.reload(1)
    assert rig.kv.admit_retrieve(1, "LLM", "guided", None) == AdmitOutcome(ready=False)
    rig.leave(2)
    assert rig.kv.admit_retrieve(1, "LLM", "guided", None) == AdmitOutcome()


def test_a_request_in_flight_stays(rig):
    ctx = rig.context([1], [1])
    assert rig.kv.admit(KVStep(), ctx).ok
    assert not rig.kv.offload(1)
    rig.kv.plan(KVStep(), ctx)
    rig.kv.commit(KVStep(), ctx)
    assert rig.kv.offload(1)


@pytest.mark.parametrize("end", ["clear_preplan", "abandon"])
def test_a_step_that_was_given_up_is_not_in_flight(rig, end):
    ctx = rig.context([1], [1], is_preplan=end == "clear_preplan")
    assert rig.kv.admit(KVStep(), ctx).ok
    if end == "abandon":
        rig.kv.abandon(KVStep(), ctx)
    else:
        rig.kv.clear_preplan()
    assert rig.kv.offload(1)


def test_without_room_on_the_host_nothing_moves(rig):
    assert rig.kv.offload(1)
    before = contents(rig, 1)
    rig.run([2], [4], step=KV_ONLY)
    assert not rig.kv.offload(2), "3 pages, and 2 are left in the pool"
    assert contents(rig, 1)[1] == [before[1][0] + 4, 0]
    assert not rig.kv.is_offloaded(2)
    rig.kv._offloading.pool.check()


def test_a_request_that_leaves_gives_its_host_pages_back(rig):
    assert rig.kv.offload(1)
    rig.leave(1)
    assert rig.kv._offloading.pool.num_free == 5
    rig.join(1, 0)
    assert not rig.kv.is_offloaded(1)


def test_without_a_pool_nothing_is_moved():
    rig = Rig()
    rig.join(1, 0)
    rig.run([1], [5], step=KV_ONLY)
    assert not rig.kv.supports_eviction
    assert not rig.kv.offload(1)
    assert not rig.kv.is_offloaded(1)
    assert (rig.kv.can_reload(1), rig.kv.reload(1), rig.kv.reclaimable(1)) == (False, False, 0)
    assert rig.kv.admit_retrieve(1, "LLM", "decode", None) == AdmitOutcome()
