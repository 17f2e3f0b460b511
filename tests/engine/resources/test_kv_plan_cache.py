"""A plan advanced from the previous step's equals the full plan, bit for bit; what may not be advanced is a miss."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.kv.config import Fork, KVStep, Retention
from mstar.engine.resources.kv.moving_plan import inserted
from mstar.engine.resources.kv.plan import HostPlan, host_plan
from mstar.engine.resources.kv.plan_cache import differences
from mstar.engine.resources.kv.step_rows import step_rows
from mstar.engine.resources.step import LabelRows, Segment, SubmoduleStep

from .drive import CAPACITY, Rig

KV_ONLY = SubmoduleStep({"kv_cache": KVStep()})


def plans_of(rig, ctx):
    return ctx.plan_results["kv_cache"]


@pytest.fixture
def rig(monkeypatch):
    return cached_rig(monkeypatch)


def cached_rig(monkeypatch, mode="1"):
    monkeypatch.setenv("MSTAR_KV_PLAN_CACHE", mode)
    rig = Rig(pages=200)
    rig.reserve(16, 64)
    for rid in range(4):
        rig.join(rid, rid)
        rig.run([rid], [3 + rid], step=KV_ONLY)
    return rig


def decode(rig, rids, padding=0, slot=0, first_padding=0, step=KV_ONLY):
    spans = [1] * (len(rids) + padding)
    return rig.run(rids, spans, plans_of, step=step, padding=padding, slot=slot, first_padding=first_padding)


def stats(rig):
    return tuple(rig.kv.plan_cache_stats[name] for name in ("hit", "miss", "mismatch"))


def assert_equals_full_plan(rig, plan):
    starts = plan.starts
    for i, (row, start) in enumerate(zip(plan.rows.tolist(), starts.tolist(), strict=True)):
        first, end = plan.indptrs.paged_kv_indptr[i : i + 2].tolist()
        pages = rig.kv.page_table[row, : -(-(start + 1) // 4)]
        assert plan.indptrs.paged_kv_indices[first:end].tolist() == pages.tolist()
        assert plan.indptrs.paged_kv_last_page_len[i] == start % 4 + 1
        assert plan.key_index[i] == int(pages[-1]) * 8 + start % 4
        assert start == (rig.kv.stored_len[row] - 1 if row < CAPACITY else 0)


@pytest.mark.parametrize("padding", [0, 2])
def test_twelve_steps_of_one_batch_are_eleven_hits(rig, padding):
    for i in range(12):
        plan = decode(rig, [0, 1, 2, 3], padding, slot=i % 2, first_padding=4 * (i % 2))["main"]
        assert plan.indptrs.qo_indptr.tolist() == list(range(5 + padding))
        assert_equals_full_plan(rig, plan)
    assert stats(rig) == (11, 0, 0)


@pytest.mark.parametrize("mode", ["0", "2"])
def test_the_other_modes(monkeypatch, mode):
    rig = cached_rig(monkeypatch, mode)
    assert rig.kv._plan_cache_mode == int(mode)
    for _ in range(5):
        decode(rig, [0, 1])
    assert stats(rig) == ((4, 0, 0) if mode == "2" else (0, 0, 0))


def test_a_difference_is_counted_and_logged_and_the_full_plan_is_used(monkeypatch, caplog):
    rig = cached_rig(monkeypatch, "2")
    decode(rig, [0, 1])
    rig.kv.stored_len[0] += 1  # behind the cache's back: no generation moved
    with caplog.at_level(logging.ERROR):
        plans = decode(rig, [0, 1])
    assert stats(rig) == (1, 0, 1)
    assert "starts, kv_lens, addresses" in caplog.text
    assert plans["main"].starts.tolist() == [5, 5]


class TestMisses:
    """Every test begins with two steps of rows 0 and 1: one that counts as neither and one hit."""

    @pytest.fixture(autouse=True)
    def begin(self, rig):
        decode(rig, [0, 1])
        decode(rig, [0, 1])
        assert stats(rig) == (1, 0, 0)

    def expect_miss_then_hits(self, rig, rids=(0, 1), padding=0):
        hits, misses, _ = stats(rig)
        assert_equals_full_plan(rig, decode(rig, list(rids), padding)["main"])
        assert stats(rig) == (hits, misses + 1, 0)
        decode(rig, list(rids), padding)
        assert stats(rig) == (hits + 1, misses + 1, 0)

    @pytest.mark.parametrize("rids", [(0, 1, 2), (0,), (1, 0), (0, 2)])
    def test_another_membership_or_order(self, rig, rids):
        self.expect_miss_then_hits(rig, rids)

    def test_another_number_of_padding_rows(self, rig):
        self.expect_miss_then_hits(rig, padding=2)

    def test_a_row_of_another_request(self, rig):
        rig.leave(1)
        rig.join(1, 1)
        self.expect_miss_then_hits(rig)

    def test_a_reset(self, rig):
        rig.kv.reset_rows([0], [0])
        self.expect_miss_then_hits(rig)

    def test_a_row_stepped_elsewhere(self, rig):
        rig.run([1], [1], step=KV_ONLY)
        self.expect_miss_then_hits(rig)

    def test_all_rows_stepped_elsewhere(self, rig):
        rig.run([0, 1], [1, 1], step=KV_ONLY)
        self.expect_miss_then_hits(rig)

    def test_planned_and_not_committed(self, rig):
        ctx = rig.context([0, 1], [1, 1], slot=0)
        rig.kv.admit(KVStep(), ctx)
        rig.kv.plan(KVStep(), ctx)
        self.expect_miss_then_hits(rig)

    def test_planned_and_not_committed_then_stepped_elsewhere(self, rig):
        ctx = rig.context([0, 1], [1, 1], slot=0)
        rig.kv.admit(KVStep(), ctx)
        rig.kv.plan(KVStep(), ctx)
        rig.run([0, 1], [1, 1], step=KV_ONLY)
        self.expect_miss_then_hits(rig)

    def test_committed_without_its_tokens(self, rig):
        decode(rig, [0, 1], step=SubmoduleStep({"kv_cache": KVStep(commit=False)}))
        self.expect_miss_then_hits(rig)

    def test_a_cleared_pre_plan(self, rig):
        ctx = rig.context([0, 1], [1, 1], slot=1, is_preplan=True)
        rig.kv.admit(KVStep(), ctx)
        rig.kv.plan(KVStep(), ctx)
        rig.kv.clear_preplan()
        self.expect_miss_then_hits(rig)

    def test_a_fork_into_a_stream(self, rig):
        fork = Fork(0, "other", "main")
        rig.run([0], [0], step=SubmoduleStep({"kv_cache": KVStep(post_forks=(fork,))}))
        self.expect_miss_then_hits(rig)

    def test_retention_that_released_something(self, rig):
        step = SubmoduleStep({"kv_cache": KVStep(retention=Retention(0, 1))})
        decode(rig, [0, 1], step=step)
        self.expect_miss_then_hits(rig)


class TestHits:
    def test_a_promoted_pre_plan_goes_on(self, rig):
        decode(rig, [0, 1])
        for i in range(3):
            ahead = rig.context([0, 1], [1, 1], slot=i % 2, is_preplan=True)
            assert rig.kv.admit(KVStep(), ahead).ok
            rig.kv.plan(KVStep(), ahead)
            ctx = rig.context([0, 1], [1, 1], slot=i % 2)
            plans = rig.kv.promote_preplan(KVStep(), ctx)
            rig.kv.commit(KVStep(), ctx)
            assert_equals_full_plan(rig, plans["main"])
        assert stats(rig) == (3, 0, 0)

    def test_the_prefill_of_another_request_invalidates_nothing(self, rig):
        decode(rig, [0, 1])
        rig.run([3], [7], step=KV_ONLY)
        decode(rig, [0, 1])
        assert stats(rig) == (1, 0, 0)

    def test_pages_reserved_ahead_invalidate_nothing(self, rig):
        decode(rig, [0, 1])
        assert rig.kv.admit(KVStep(), rig.context([0, 1], [9, 9])).ok
        assert_equals_full_plan(rig, decode(rig, [0, 1])["main"])
        assert stats(rig) == (1, 0, 0)

    @pytest.mark.parametrize("kind", [{}, {"slot": 0, "capture": True}])
    def test_eager_and_captured_steps_neither_count_nor_disturb(self, rig, kind):
        decode(rig, [0, 1])
        rig.run([2], [1], step=KV_ONLY, **kind)
        decode(rig, [0, 1])
        assert stats(rig) == (1, 0, 0)

    def test_steps_that_are_no_decode_steps_do_not_count(self, rig):
        for _ in range(3):
            rig.run([0, 1], [1, 2], step=KV_ONLY, slot=0)
        assert stats(rig) == (0, 0, 0)

    def test_several_labels_advance_together(self, rig):
        segments = tuple(Segment(rid, label, 1) for label in ("main", "cfg") for rid in (0, 1))
        step = SubmoduleStep({"kv_cache": KVStep(combined_labels={("main", "cfg"): "both"})}, segments=segments)
        for _ in range(9):
            plans = decode(rig, [0, 1], step=step)
            both = plans["both"]
            assert both.starts.tolist() == (rig.kv.stored_len[both.streams] - 1).tolist()
            for i in range(4):
                first, end = both.indptrs.paged_kv_indptr[i : i + 2]
                pages = rig.kv.page_table[both.streams[i], : rig.kv.num_pages[both.streams[i]]]
                assert both.indptrs.paged_kv_indices[first:end].tolist() == pages.tolist()
        assert stats(rig) == (8, 0, 0)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.integers(1, 6)),
        st.tuples(st.just("join"), st.integers(1, 9)),
        st.tuples(st.just("leave"), st.integers(0, 5)),
        st.tuples(st.just("elsewhere"), st.integers(0, 5)),
        st.tuples(st.just("uncommitted"), st.just(0)),
        st.tuples(st.just("ahead"), st.booleans()),
    ),
    min_size=5,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, padding=st.sampled_from([0, 2]))
def test_any_trace_gives_the_plans_of_a_cache_that_is_off(operations, padding):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSTAR_KV_PLAN_CACHE", "2")
        rig = Rig(pages=300)
    rig.reserve(16, 64)
    live, next_id = [], 0
    for name, value in [("join", 5), ("join", 2), *operations]:
        if name == "join" and len(live) < 6:
            row = min(set(range(CAPACITY)) - {rig.row_of[rid] for rid in live})
            rig.join(next_id, row)
            rig.run([next_id], [value], step=KV_ONLY)
            live.append(next_id)
            next_id += 1
        elif not live:
            continue
        elif name == "leave":
            rig.leave(live.pop(value % len(live)))
        elif name == "elsewhere":
            rig.run([live[value % len(live)]], [1], step=KV_ONLY)
        elif name == "decode":
            for i in range(value):
                decode(rig, live, padding, slot=i % 2, first_padding=4 * (i % 2))
        else:
            spans = [1] * (len(live) + padding)
            ctx = rig.context(live, spans, padding, slot=0, is_preplan=name == "ahead")
            rig.kv.admit(KVStep(), ctx)
            rig.kv.plan(KVStep(), ctx)
            if name == "ahead" and value:
                ctx = rig.context(live, spans, padding, slot=0)
                rig.kv.promote_preplan(KVStep(), ctx)
                rig.kv.commit(KVStep(), ctx)
            elif name == "ahead":
                rig.kv.clear_preplan()
    assert rig.kv.plan_cache_stats["mismatch"] == 0


def test_differences_names_arrays_by_value_and_shape_and_type(rig):
    rows = decode(rig, [0, 1])["main"]
    (planned,) = step_rows(
        {"main": LabelRows("main", (0, 1), rows.rows, rows.spans, 2)}, {}, rig.kv._streams, 8
    ).planned
    a, b = (host_plan(planned, rig.kv.stored_len + more, rig.kv.page_table, 4) for more in (0, 4))
    assert differences(a, a) == []
    assert "paged_kv_indptr" in differences(a, b)
    narrow = HostPlan(a.starts.astype(np.int32), a.kv_lens, a.addresses, a.indptrs)
    assert differences(a, narrow) == ["starts"]


@given(st.lists(st.integers(0, 9)), st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19))))
def test_inserted_equals_numpys(array, insertions):
    insertions = sorted((min(at, len(array)), value) for at, value in insertions)
    at = np.array([at for at, _ in insertions], np.int64)
    values = np.array([value for _, value in insertions], np.int32)
    array = np.array(array, np.int32)
    assert inserted(array, at, values).tolist() == np.insert(array, at, values).tolist()
