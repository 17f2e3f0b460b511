"""Paged KV: pages are conserved, refusals take nothing, padding owns nothing, plans address the right elements."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.kv.config import KVReqConfig, KVStep, PagedKVConfig
from mstar.engine.resources.kv.pages import SINK_PAGE, PageArena
from mstar.engine.resources.step import AdmitRuntimeError, AllocationFailed, SubmoduleStep

from .drive import CAPACITY, Rig

KV_ONLY = SubmoduleStep({"kv_cache": KVStep()})


def plan_of(rig, ctx):
    return ctx.plan_results["kv_cache"]


def admit(rig, rids, spans):
    return rig.kv.admit(KVStep(), rig.context(rids, spans))


class TestArena:
    def test_the_sink_page_is_never_handed_out(self):
        arena = PageArena(10)
        assert arena.num_usable == arena.num_free == 9
        assert sorted(arena.try_allocate(9)) == list(range(1, 10))

    def test_allocation_is_all_or_nothing(self):
        arena = PageArena(5)
        assert arena.try_allocate(5) is None
        assert arena.num_free == 4

    def test_pages_come_back_in_the_order_they_were_freed(self):
        arena = PageArena(5)
        arena.try_allocate(4)
        arena.free(np.array([3, 1]))
        assert arena.try_allocate(2).tolist() == [3, 1]

    @pytest.mark.parametrize("pages", [[2, 2], [SINK_PAGE]])
    def test_a_double_free_is_caught(self, pages):
        arena = PageArena(5)
        arena.free(arena.try_allocate(4)[1:2])
        with pytest.raises(AssertionError):
            arena.free(np.array(pages))


class PagesUnderRandomUse(RuleBasedStateMachine):
    """Requests join, grow, are refused and leave in any order; the model is a dict of lengths."""

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
        self.lengths[self.next_id] = 0
        self.next_id += 1

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def leave(self, data):
        rid = data.draw(st.sampled_from(sorted(self.lengths)))
        del self.lengths[rid]
        self.rig.leave(rid)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), padding=st.integers(0, 2), is_committed=st.booleans())
    def grow(self, data, padding, is_committed):
        rids = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), min_size=1, unique=True))
        spans = data.draw(st.lists(st.integers(0, 13), min_size=len(rids), max_size=len(rids)))
        ctx = self.rig.context(rids, spans + [1] * padding, padding)
        free = self.rig.kv.free_pages
        held = {r: self.rig.kv.num_pages[self.rig.row_of[r]] for r in rids}
        need = sum(max(0, -(-(self.lengths[r] + n) // 4) - held[r]) for r, n in zip(rids, spans, strict=True))
        too_long = any(self.lengths[r] + n > 60 for r, n in zip(rids, spans, strict=True))
        outcome = self.rig.kv.admit(KVStep(), ctx)
        assert outcome.ok == (need <= free and not too_long)
        assert self.rig.kv.free_pages == free - (need if outcome.ok else 0)
        if outcome.ok:
            assert self.rig.kv.admit(KVStep(), ctx).ok, "a re-driven admit takes nothing more"
            assert self.rig.kv.free_pages == free - need
            if is_committed:
                self.rig.kv.commit(KVStep(), ctx)
                for rid, span in zip(rids, spans, strict=True):
                    self.lengths[rid] += span

    @invariant()
    def pages_are_conserved(self):
        self.rig.kv.check_pages()
        assert not self.rig.kv.num_pages[CAPACITY:].any(), "padding rows own nothing"
        for rid, length in self.lengths.items():
            row = self.rig.row_of[rid]
            assert self.rig.kv.stored_len[row] == length
            assert self.rig.kv.num_pages[row] * 4 >= length
            assert (self.rig.kv.page_table[row, : self.rig.kv.num_pages[row]] != SINK_PAGE).all()
        if not self.lengths:
            assert self.rig.kv.free_pages == self.rig.kv.num_usable_pages


TestPagesUnderRandomUse = PagesUnderRandomUse.TestCase
TestPagesUnderRandomUse.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=6),
    slot=st.none() | st.integers(0, 1),
)
def test_a_plan_addresses_each_new_token_where_its_row_continues(rows, slot):
    rig = Rig(pages=128)
    rig.reserve(8, 128)
    starts, spans = zip(*rows, strict=True)
    rids = list(range(len(rows)))
    for rid in rids:
        rig.join(rid, rid)
    rig.run(rids, starts, step=KV_ONLY)
    plan = rig.run(rids, spans, plan_of, step=KV_ONLY, slot=slot)
    expected = []
    for row, (start, span) in enumerate(rows):
        pages = rig.kv.page_table[row]
        expected += [int(pages[p // 4]) * 8 + p % 4 for p in range(start, start + span)]
    assert plan.key_index.tolist() == expected
    assert plan.value_index.tolist() == [i + 4 for i in expected]
    assert len(set(expected)) == len(expected)
    assert plan.kv_lens.tolist() == [s + n for s, n in rows]
    assert plan.qo_indptr.tolist() == np.cumsum([0, *spans]).tolist()
    assert plan.num_tokens == sum(spans)


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
    rig.run([1], [6], step=SubmoduleStep({"kv_cache": KVStep(commit=False)}))
    assert (rig.kv.stored_len[0], rig.kv.num_pages[0]) == (0, 2)


def test_padding_rows_address_the_sink_and_own_nothing():
    rig = Rig()
    rig.reserve(4, 4)
    rig.join(1, 0)
    plan = rig.run([1], [1, 1, 1], plan_of, step=KV_ONLY, padding=2, slot=0)
    assert plan.key_index.tolist() == [8, 0, 0]
    assert plan.page_table[1:].tolist() == [[SINK_PAGE], [SINK_PAGE]]
    assert rig.kv.free_pages == rig.kv.num_usable_pages - 1
    assert rig.kv.stored_len[CAPACITY:].sum() == 0


def test_leased_plans_reuse_their_slots_buffer_and_eager_ones_do_not():
    rig = Rig()
    rig.reserve(4, 16)
    rig.join(1, 0)
    address = [rig.run([1], [1], plan_of, step=KV_ONLY, slot=slot).key_index.data_ptr() for slot in (0, 1, 0, 1, None)]
    assert address[0] == address[2] != address[1] == address[3]
    assert address[4] not in address[:4]


def test_refusal_says_how_many_pages_are_short_and_who_was_first():
    rig = Rig(pages=6)
    rig.join(1, 0)
    rig.join(2, 1)
    outcome = admit(rig, [1, 2], [16, 8])
    assert outcome.reason == AllocationFailed(
        "the step needs 6 KV pages, 5 are free", pages_short=1, label="main", request_id=2
    )


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


def test_reservations_count_what_running_requests_may_still_take():
    rig = Rig(pages=11)
    rig.join(1, 0, kv=KVReqConfig(prompt_tokens=6, max_tokens=10))
    assert rig.kv.promised_pages == 4
    rig.run([1], [6], step=KV_ONLY)
    assert (rig.kv.promised_pages, rig.kv.free_pages) == (2, 8)
    assert rig.kv.fits_now(24)
    assert not rig.kv.fits_now(25)
    rig.leave(1)
    assert rig.kv.promised_pages == 0


def test_a_request_that_can_never_fit_is_refused_with_both_numbers():
    rig = Rig(pages=6)
    assert rig.kv.can_ever_fit(20)
    assert not rig.kv.can_ever_fit(21)
    with pytest.raises(ValueError, match=r"needs 6 KV pages of 4 tokens.*has 5"):
        rig.kv.ingest_request(1, 0, KVReqConfig(prompt_tokens=1, max_tokens=20))
    assert rig.kv.promised_pages == 0


def test_pages_are_counted_up_to_max_seq_len():
    rig = Rig(max_seq_len=10)
    assert [rig.kv.pages_for(n) for n in (0, 1, 4, 5, 10, 1000)] == [0, 1, 1, 2, 3, 3]


def test_warm_up_that_leaves_pages_taken_is_an_error():
    rig = Rig()
    rig.kv.post_warmup_validate()
    rig.join(1, 0)
    rig.run([1], [5], step=KV_ONLY)
    with pytest.raises(RuntimeError, match="2 KV pages"):
        rig.kv.post_warmup_validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 0), ("max_num_pages", 1), ("page_size", True), ("max_seq_len", 4.0), ("num_qo_heads", 3)],
)
def test_a_malformed_config_is_refused_by_field(field, value):
    good = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "max_seq_len": 16, "num_qo_heads": 4}
    assert PagedKVConfig(**good).page_bytes(4) == 2 * 128 * 2 * 8 * 4
    with pytest.raises(ValueError, match=field):
        PagedKVConfig(**good | {field: value})


def test_query_heads_default_to_kv_heads():
    assert PagedKVConfig(num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=16).num_qo_heads == 2


def test_the_cache_is_zeroed_and_shaped_as_declared():
    rig = Rig(pages=7, layers=3, kv_heads=2, dim=16)
    assert rig.kv.cache.shape == (3, 7, 2, 4, 2, 16)
    assert torch.count_nonzero(rig.kv.cache) == 0
