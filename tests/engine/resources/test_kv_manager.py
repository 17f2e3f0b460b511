"""Paged KV: pages are conserved, refusals take nothing, padding owns nothing, plans address the right elements."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.kv.config import KVReqConfig, KVStep, PagedKVConfig, Retention
from mstar.engine.resources.kv.pages import SINK_PAGE
from mstar.engine.resources.step import AdmitRuntimeError, AllocationFailed, Segment, SubmoduleStep

from .drive import CAPACITY, Rig

KV_ONLY = SubmoduleStep({"kv_cache": KVStep()})


def kv_step(*segments, **options):
    return SubmoduleStep({"kv_cache": KVStep(**options)}, segments=tuple(Segment(*s) for s in segments) or None)


def plans_of(rig, ctx):
    return ctx.plan_results["kv_cache"]


def plan_of(rig, ctx):
    return plans_of(rig, ctx)["main"]


def admit(rig, rids, spans):
    return rig.kv.admit(KVStep(), rig.context(rids, spans))


def pages_read(plan, i):
    indptr = plan.indptrs.paged_kv_indptr
    return plan.indptrs.paged_kv_indices[indptr[i] : indptr[i + 1]].tolist()


class PagesUnderRandomUse(RuleBasedStateMachine):
    """Requests join, grow under two labels, are refused and leave in any order; the model is a dict of lengths."""

    def __init__(self):
        super().__init__()
        self.rig = Rig(pages=20, max_seq_len=60)
        self.lengths = {}
        self.next_id = 0

    @precondition(lambda self: len(self.lengths) < CAPACITY)
    @rule()
    def join(self):
        row = min(set(range(CAPACITY)) - {self.rig.row_of[r] for r in self.lengths})
        self.rig.join(self.next_id, row)
        self.lengths[self.next_id] = {"main": 0, "other": 0}
        self.next_id += 1

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def leave(self, data):
        rid = data.draw(st.sampled_from(sorted(self.lengths)))
        del self.lengths[rid]
        self.rig.leave(rid)

    def stream(self, rid, label):
        return self.rig.row_of[rid] + {"main": 0, "other": 1}[label] * self.rig.kv._streams.total_rows

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), padding=st.integers(0, 2), is_committed=st.booleans())
    def grow(self, data, padding, is_committed):
        rig, kv = self.rig, self.rig.kv
        rids = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), min_size=1, unique=True))
        segments = [
            Segment(rid, label, data.draw(st.integers(0, 13)))
            for label in data.draw(st.sampled_from([["main"], ["other"], ["main", "other"]]))
            for rid in rids
        ]
        kv._streams.of("main", np.zeros(0, np.int64)), kv._streams.of("other", np.zeros(0, np.int64))
        segments += [Segment(-2 - i, "main", 1) for i in range(padding)]
        real = [s for s in segments if s.request_id >= 0]
        step = KVStep(segments=tuple(segments))
        ctx = rig.context(rids, [0] * (len(rids) + padding), padding)
        after = {s: self.lengths[s.request_id][s.label] + s.span for s in real}
        need = sum(max(0, -(-after[s] // 4) - int(kv.num_pages[self.stream(s.request_id, s.label)])) for s in real)
        too_long = any(length > 60 for length in after.values())
        free = kv.free_pages
        outcome = kv.admit(step, ctx)
        assert outcome.ok == (need <= free and not too_long)
        assert kv.free_pages == free - (need if outcome.ok else 0)
        if outcome.ok:
            assert kv.admit(step, ctx).ok, "a re-driven admit takes nothing more"
            assert kv.free_pages == free - need
            if is_committed:
                kv.plan(step, ctx)
                kv.commit(step, ctx)
                for s in real:
                    self.lengths[s.request_id][s.label] += s.span

    @invariant()
    def pages_are_conserved(self):
        kv = self.rig.kv
        kv.check_pages()
        is_padding = np.arange(kv.num_pages.size) % kv._streams.total_rows >= CAPACITY
        assert not kv.num_pages[is_padding].any(), "padding rows own nothing"
        for rid, by_label in self.lengths.items():
            for label, length in by_label.items():
                stream = self.stream(rid, label)
                if stream < kv.num_pages.size:
                    assert kv.stored_len[stream] == length
                    assert kv.num_pages[stream] * 4 >= length
                    assert (kv.page_table[stream, : kv.num_pages[stream]] != SINK_PAGE).all()
        if not self.lengths:
            assert kv.free_pages == kv.num_usable_pages


TestPagesUnderRandomUse = PagesUnderRandomUse.TestCase
TestPagesUnderRandomUse.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=6),
    slot=st.none() | st.integers(0, 1),
    unused=st.integers(0, 5),
)
def test_a_plan_addresses_each_new_token_where_its_row_continues(rows, slot, unused):
    rig = Rig(pages=128)
    rig.reserve(8, 128)
    starts, spans = zip(*rows, strict=True)
    rids = list(range(len(rows)))
    for rid in rids:
        rig.join(rid, rid)
    rig.run(rids, starts, step=KV_ONLY)
    tokens = sum(spans) + unused if slot is not None and sum(spans) else None
    plan = rig.run(rids, spans, plan_of, step=KV_ONLY, slot=slot, bucket_tokens=tokens)
    expected = []
    for row, (start, span) in enumerate(rows):
        pages = rig.kv.page_table[row]
        expected += [int(pages[p // 4]) * 8 + p % 4 for p in range(start, start + span)]
    assert len(set(expected)) == len(expected)
    if tokens is not None:
        expected += [0] * unused  # the sink page's first element
    assert plan.num_tokens == len(expected)
    assert plan.key_index.tolist() == expected
    assert plan.value_index.tolist() == [i + 4 for i in expected]
    assert plan.kv_lens.tolist() == [s + n for s, n in rows]
    assert plan.indptrs.qo_indptr.tolist() == np.cumsum([0, *spans]).tolist()
    assert plan.is_decode == all(span == 1 for span in spans)


def test_a_decode_row_gains_a_page_exactly_when_it_crosses_a_boundary():
    rig = Rig()
    rig.join(1, 0)
    held = []
    for _ in range(10):
        rig.run([1], [1], step=KV_ONLY)
        held.append(int(rig.kv.num_pages[0]))
    assert held == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]


def test_a_step_that_is_not_committed_keeps_its_pages_and_length():
    rig = Rig()
    rig.join(1, 0)
    rig.run([1], [6], step=kv_step(commit=False))
    assert (rig.kv.stored_len[0], rig.kv.num_pages[0]) == (0, 2)


def test_surplus_pages_are_no_part_of_a_plan():
    rig = Rig()
    rig.join(1, 0)
    rig.run([1], [14], step=kv_step(commit=False))
    plan = rig.run([1], [5], plan_of, step=KV_ONLY)
    assert rig.kv.num_pages[0] == 4
    assert pages_read(plan, 0) == rig.kv.page_table[0, :2].tolist()
    assert plan.indptrs.paged_kv_last_page_len.tolist() == [1]


def test_a_segment_of_span_0_reads_its_stream_and_leaves_it_as_it_is():
    rig = Rig()
    rig.join(1, 0)
    rig.run([1], [6], step=KV_ONLY)
    state = (rig.kv.stored_len[0], rig.kv.num_pages[0], rig.kv.generation[0], rig.kv.free_pages)
    plan = rig.run([1], [0], plan_of, step=KV_ONLY)
    assert pages_read(plan, 0) == rig.kv.page_table[0, :2].tolist()
    assert (plan.kv_lens.tolist(), plan.num_tokens, plan.indptrs.qo_indptr.tolist()) == ([6], 0, [0, 0])
    assert state == (rig.kv.stored_len[0], rig.kv.num_pages[0], rig.kv.generation[0], rig.kv.free_pages)


class TestLabels:
    def test_each_label_of_a_request_is_a_stream_of_its_own(self):
        rig = Rig()
        rig.join(1, 0)
        rig.join(2, 5)
        step = kv_step((1, "main", 5), (2, "main", 1), (2, "cfg", 9))
        plans = rig.run([1, 2], [5, 1], plans_of, step=step)
        assert list(plans) == ["main", "cfg"]
        assert plans["cfg"].rows.tolist() == [5]
        assert plans["cfg"].streams.tolist() == [5 + rig.kv._streams.total_rows]
        assert rig.kv.stored_len[plans["cfg"].streams].tolist() == [9]
        assert rig.kv.stored_len[[0, 5]].tolist() == [5, 1]
        assert rig.kv.free_pages == rig.kv.num_usable_pages - (2 + 1 + 3)
        rig.leave(2)
        rig.leave(1)
        assert rig.kv.free_pages == rig.kv.num_usable_pages

    def test_combined_labels_are_planned_end_to_end_label_by_label(self):
        rig = Rig()
        rig.reserve(8, 16)
        rig.join(1, 0)
        rig.join(2, 1)
        pads = [(-2, "main", 1), (-2, "cfg", 1)]
        segments = [(1, "main", 1), (2, "main", 1), pads[0], (1, "cfg", 1), (2, "cfg", 1), pads[1], (1, "side", 2)]
        step = kv_step(*segments, combined_labels={("main", "cfg"): "both"})
        plans = rig.run([1, 2], [1, 1, 1], plans_of, step=step, padding=1, slot=0, bucket_tokens=12)
        both = plans["both"]
        assert list(plans) == ["side", "both"]
        assert both.rows.tolist() == [0, 1, 8, 0, 1, 8]
        assert (both.streams >= rig.kv._streams.total_rows).tolist() == [False] * 3 + [True] * 3
        assert (both.num_real, both.num_tokens, plans["side"].num_tokens) == (4, 6, 6)
        assert both.is_decode
        assert both.indptrs.paged_kv_indices[[2, 5]].tolist() == [SINK_PAGE, SINK_PAGE]
        assert rig.kv.stored_len[both.streams].tolist() == [1, 1, 0, 1, 1, 0]

    def test_a_combined_label_without_segments_is_a_key_error(self):
        rig = Rig()
        rig.join(1, 0)
        step = KVStep(segments=(Segment(1, "main", 1),), combined_labels={("main", "cfg"): "both"})
        with pytest.raises(KeyError, match="'both' combines labels without segments: cfg"):
            rig.kv.admit(step, rig.context([1], [1]))


def test_retention_releases_the_oldest_whole_pages_behind_the_protected_ones():
    rig = Rig()
    rig.join(1, 0)
    rig.run([1], [30], step=KV_ONLY)
    before = rig.kv.page_table[0, :8].tolist()
    generation = int(rig.kv.generation[0])
    rig.run([1], [1], step=kv_step(retention=Retention(protected_tokens=5, keep_tokens=10)))
    # 31 tokens: pages 0 and 1 are protected, the last 10 begin in page 5, so 2, 3 and 4 go.
    assert rig.kv.page_table[0, :6].tolist() == [*before[:2], *before[5:], SINK_PAGE]
    assert rig.kv.stored_len[0] == 31 - 12
    assert rig.kv.generation[0] > generation
    plan = rig.run([1], [1], plan_of, step=KV_ONLY)
    assert pages_read(plan, 0) == [*before[:2], *before[5:]]
    assert plan.starts.tolist() == [19]


@pytest.mark.parametrize("bad", [{"protected_tokens": -1}, {"keep_tokens": True}, {"keep_tokens": 1.5}])
def test_a_malformed_retention_is_refused_by_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Retention(**{"protected_tokens": 0, "keep_tokens": 0} | bad)


class TestPadding:
    def test_rows_address_the_sink_and_own_nothing(self):
        rig = Rig()
        rig.reserve(4, 4)
        rig.join(1, 0)
        plan = rig.run([1], [1, 1, 1], plan_of, step=KV_ONLY, padding=2, slot=0)
        assert plan.key_index.tolist() == [8, 0, 0]
        assert [pages_read(plan, i) for i in range(3)] == [[1], [SINK_PAGE], [SINK_PAGE]]
        assert plan.num_real == 1
        assert rig.kv.free_pages == rig.kv.num_usable_pages - 1
        assert rig.kv.stored_len[CAPACITY:].sum() == 0

    def test_rows_of_a_capture_longer_than_any_stream_stay_on_the_sink_page(self):
        rig = Rig(max_seq_len=10)
        rig.reserve(4, 64)
        plan = rig.run([], [33, 1], plan_of, step=KV_ONLY, padding=2, slot=0, capture=True)
        assert [pages_read(plan, i) for i in range(2)] == [[SINK_PAGE] * 9, [SINK_PAGE]]
        assert plan.key_index.max() < 4
        assert plan.value_index.max() < 8


def test_leased_plans_reuse_their_slots_buffer_and_eager_ones_do_not():
    rig = Rig()
    rig.reserve(4, 16)
    rig.join(1, 0)
    plans = [rig.run([1], [1], plan_of, step=KV_ONLY, slot=slot) for slot in (0, 1, 0, 1, None)]
    for index in ("key_index", "value_index"):
        address = [getattr(plan, index).data_ptr() for plan in plans]
        assert address[0] == address[2] != address[1] == address[3]
        assert address[4] not in address[:4]


class TestPlanningAhead:
    def stage(self, rig, rids, spans, slot):
        ctx = rig.context(rids, spans, slot=slot, is_preplan=True)
        assert rig.kv.admit(KVStep(), ctx).ok
        return rig.kv.plan(KVStep(), ctx)["main"]

    def begin(self):
        rig = Rig()
        rig.reserve(4, 16)
        for rid in (1, 2):
            rig.join(rid, rid)
            rig.run([rid], [rid + 2], step=KV_ONLY)
        return rig

    def test_a_promoted_plan_is_the_one_that_was_staged_and_equals_an_inline_one(self):
        rig, other = self.begin(), self.begin()
        staged = self.stage(rig, [1, 2], [1, 1], slot=1)
        ctx = rig.context([1, 2], [1, 1], slot=1)
        assert rig.kv.promote_preplan(KVStep(), ctx)["main"] is staged
        rig.kv.commit(KVStep(), ctx)
        inline = other.run([1, 2], [1, 1], plan_of, step=KV_ONLY, slot=1)
        assert staged.key_index.tolist() == inline.key_index.tolist()
        assert [a.tolist() for a in vars(staged.indptrs).values()] == [
            a.tolist() for a in vars(inline.indptrs).values()
        ]
        assert rig.kv.stored_len.tolist() == other.kv.stored_len.tolist()

    def test_it_writes_to_the_buffer_of_its_own_slot(self):
        rig = self.begin()
        running = rig.run([1], [1], plan_of, step=KV_ONLY, slot=0)
        before = running.key_index.tolist()
        self.stage(rig, [1], [1], slot=1)
        assert running.key_index.tolist() == before

    def test_a_stream_that_moved_since_is_planned_again(self):
        rig = self.begin()
        staged = self.stage(rig, [1, 2], [1, 1], slot=1)
        rig.run([2], [4], step=KV_ONLY)
        ctx = rig.context([1, 2], [1, 1], slot=1)
        plan = rig.kv.promote_preplan(KVStep(), ctx)["main"]
        assert staged.starts.tolist() == [3, 4]
        assert plan.starts.tolist() == [3, 8]

    def test_clearing_changes_no_length_and_may_be_asked_without_a_plan(self):
        rig = self.begin()
        rig.kv.clear_preplan()
        self.stage(rig, [1], [1], slot=1)
        rig.kv.clear_preplan()
        assert rig.run([1], [1], plan_of, step=KV_ONLY, slot=1).starts.tolist() == [3]


def test_refusal_says_how_many_pages_are_short_and_who_was_first():
    rig = Rig(pages=6)
    rig.join(1, 0)
    rig.join(2, 1)
    outcome = admit(rig, [1, 2], [16, 8])
    assert outcome.reason == AllocationFailed(
        "the step needs 6 KV pages, 5 are free", pages_short=1, label="main", request_id=2
    )


def test_refusal_names_the_label():
    rig = Rig(pages=6)
    rig.join(1, 0)
    step = KVStep(segments=(Segment(1, "main", 8), Segment(1, "cfg", 20)))
    outcome = rig.kv.admit(step, rig.context([1], [8]))
    assert (outcome.reason.label, outcome.reason.pages_short, outcome.reason.request_id) == ("cfg", 2, 1)


def test_a_row_past_max_seq_len_is_an_error_of_that_request():
    rig = Rig(max_seq_len=10)
    rig.join(1, 0)
    rig.join(2, 1)
    rig.run([2], [10], step=KV_ONLY)
    outcome = admit(rig, [1, 2], [1, 1])
    assert outcome.reason == AdmitRuntimeError("the stream would hold 11 tokens, max_seq_len is 10", 2)


def test_ingest_is_idempotent_and_a_row_starts_empty_for_its_next_owner():
    rig = Rig()
    rig.join(1, 0)
    rig.run([1], [9], step=KV_ONLY)
    rig.join(1, 0)
    assert rig.kv.stored_len[0] == 9
    rig.leave(1)
    rig.kv.remove_request(1, 0)
    assert rig.kv.free_pages == rig.kv.num_usable_pages
    rig.join(2, 0)
    assert rig.kv.stored_len[0] == 0


def test_a_reset_row_keeps_its_pages_unless_they_are_to_be_freed():
    rig = Rig()
    rig.join(1, 0)
    rig.run([1], [9], step=KV_ONLY)
    rig.kv.reset_rows([1], [0])
    assert (rig.kv.stored_len[0], rig.kv.num_pages[0]) == (0, 3)
    rig.kv.reset_rows([1], [0], free=True)
    assert rig.kv.num_pages[0] == 0
    rig.kv.check_pages()


class TestReservations:
    def test_they_count_what_running_requests_may_still_take(self):
        rig = Rig(pages=11)
        rig.join(1, 0, kv=KVReqConfig(prompt_tokens=6, max_tokens=10))
        assert rig.kv.promised_pages == 4
        rig.run([1], [6], step=KV_ONLY)
        assert (rig.kv.promised_pages, rig.kv.free_pages) == (2, 8)
        assert rig.kv.can_join(KVReqConfig(prompt_tokens=4, max_tokens=20))
        assert not rig.kv.can_join(KVReqConfig(prompt_tokens=4, max_tokens=21))
        version = rig.kv.admission_version
        rig.leave(1)
        assert rig.kv.promised_pages == 0
        assert rig.kv.admission_version != version

    def test_every_label_of_a_request_counts(self):
        rig = Rig(pages=11)
        labels = {("LLM", "decode"): ("main", "cfg"), "LLM": ("main",)}
        config = KVReqConfig(prompt_tokens=6, max_tokens=10, needed_labels=labels)
        assert config.labels_of("LLM", "decode") == ("main", "cfg")
        assert config.labels_of("LLM", "prefill") == config.labels_of("other", "decode") == ("main",)
        rig.join(1, 0, kv=config)
        assert rig.kv.promised_pages == 8

    def test_a_request_that_can_never_fit_is_refused_with_both_numbers(self):
        rig = Rig(pages=6)
        assert rig.kv.can_ever_fit(20)
        assert not rig.kv.can_ever_fit(21)
        with pytest.raises(ValueError, match=r"needs 6 KV pages of 4 tokens.*has 5"):
            rig.kv.ingest_request(1, 0, KVReqConfig(prompt_tokens=1, max_tokens=20))
        assert rig.kv.promised_pages == 0

    def test_pages_are_counted_up_to_max_seq_len(self):
        rig = Rig(max_seq_len=10)
        assert [rig.kv.pages_for(n) for n in (0, 1, 4, 5, 10, 1000)] == [0, 1, 1, 2, 3, 3]


def test_warm_up_that_leaves_pages_taken_is_an_error():
    rig = Rig()
    rig.kv.post_warmup_validate()
    rig.join(1, 0)
    rig.run([1], [5], step=KV_ONLY)
    with pytest.raises(RuntimeError, match="2 KV pages"):
        rig.kv.post_warmup_validate()


def test_debug_asserts_check_every_commit_and_what_is_written(monkeypatch):
    monkeypatch.setenv("MSTAR_KV_DEBUG_ASSERTS", "1")
    rig = Rig()
    rig.join(1, 0)
    rig.run([1], [5], step=KV_ONLY)
    shared = rig.kv.page_table[0, 1:2]
    rig.kv.arena.seal(shared)
    with pytest.raises(AssertionError, match="sealed page"):
        rig.run([1], [1], step=KV_ONLY)
    rig.kv.arena.share(shared)
    with pytest.raises(AssertionError, match="several owners"):
        rig.run([1], [1], step=KV_ONLY)
    rig.kv.page_table[0, 0] = rig.kv.page_table[0, 1]
    with pytest.raises(AssertionError, match="owner counts differ"):
        rig.kv.commit(KVStep(), rig.context([1], [1]))


def test_query_heads_default_to_kv_heads():
    assert PagedKVConfig(num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=16).num_qo_heads == 2


def test_the_cache_is_zeroed_and_shaped_as_declared():
    rig = Rig(pages=7, layers=3, kv_heads=2, dim=16)
    assert rig.kv.cache.shape == (3, 7, 2, 4, 2, 16)
    assert torch.count_nonzero(rig.kv.cache) == 0
