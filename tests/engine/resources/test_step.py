"""What a step declares, and the facts of it that every resource sees alike."""

import dataclasses

import numpy as np
import pytest

from mstar.engine.resources.attention.config import AttentionStep
from mstar.engine.resources.kv.config import KVStep
from mstar.engine.resources.positions.config import PositionStep
from mstar.engine.resources.sampler.config import SamplerStep
from mstar.engine.resources.step import (
    ADMITTED,
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    BucketKey,
    RequestOffloading,
    ResourceStep,
    Segment,
    SlotLease,
    StepContext,
    SubmoduleStep,
)

ONE, TWO = Segment(1, "main", 3), Segment(2, "main", 1)


def context(spans=(3, 1, 1), real=2, **fields):
    """Requests 1 and 2 on rows 5 and 4; padding rows from 8."""
    padded = (1, 2, -2, -3)[: len(spans)]
    rows = np.array([5, 4, 8, 9][: len(spans)], np.int64)
    return StepContext("decode", padded[:real], rows, np.array(spans, np.int64), padded, **fields)


# Declarations


def test_a_segment_is_a_triple():
    assert ONE == (1, "main", 3)
    assert ONE._fields == ("request_id", "label", "span")


@pytest.mark.parametrize("cls", [KVStep, AttentionStep, PositionStep, SamplerStep])
def test_every_resources_step_is_frozen_and_begins_with_its_segments(cls):
    assert issubclass(cls, ResourceStep)
    assert dataclasses.fields(cls)[0].name == "segments"
    assert cls().segments is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().segments = ()


def test_a_step_hands_its_segments_to_the_parts_that_have_none_and_changes_nothing_else_of_them():
    own = SamplerStep(segments=(TWO,), apply_filters=False)
    bare = KVStep(commit=False)
    step = SubmoduleStep({"sampler": own, "kv_cache": bare}, segments=(ONE, TWO))
    assert step.get("sampler") is own
    assert step.get("kv_cache") == KVStep(segments=(ONE, TWO), commit=False)
    assert bare.segments is None


def test_a_step_without_segments_leaves_its_parts_without():
    assert SubmoduleStep({"kv_cache": KVStep()}).get("kv_cache").segments is None


def test_a_part_with_no_segments_on_purpose_keeps_its_empty_tuple():
    assert SubmoduleStep({"kv_cache": KVStep(segments=())}, segments=(ONE,)).get("kv_cache").segments == ()


def test_a_step_is_asked_like_a_mapping_and_is_frozen():
    step = SubmoduleStep({"b": ResourceStep(), "a": ResourceStep()})
    assert list(step.keys()) == ["b", "a"]
    assert "a" in step
    assert "c" not in step
    assert step.get("c") is None
    assert step.cg_key_info is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.cg_key_info = "full"


# Buckets and leases


def test_buckets_are_equal_by_what_they_capture_and_print_it():
    key = BucketKey("decode", 8, 16, "full")
    assert str(key) == "decode[bs=8,tokens=16,key=full]"
    assert str(BucketKey("prefill", 1, 64)) == "prefill[bs=1,tokens=64,key=None]"
    others = [("prefill", 8, 16, "full"), ("decode", 4, 16, "full"), ("decode", 8, 8, "full"), ("decode", 8, 16)]
    assert len({key, BucketKey("decode", 8, 16, "full"), *(BucketKey(*other) for other in others)}) == 5


def test_a_lease_cannot_be_changed():
    lease = SlotLease(1, BucketKey("decode", 1, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        lease.slot = 0


# Context


def test_without_padding_the_padded_ids_are_the_requests_own():
    ctx = StepContext("prefill", (7,), np.array([0]), np.array([4]))
    assert ctx.padded_request_ids == (7,)
    assert ctx.num_real == 1
    assert ctx.slot_lease is None, "no lease is an eager step"
    assert not (ctx.capture)
    assert not (ctx.is_preplan)
    assert not (ctx.is_packed)
    assert not ctx.plan_results


def test_a_part_without_segments_has_every_row_under_main():
    (rows,) = context().labels(KVStep()).values()
    assert (rows.label, rows.request_ids, rows.num_real) == ("main", (1, 2, -2), 2)
    assert rows.rows.tolist() == [5, 4, 8]
    assert rows.spans.tolist() == [3, 1, 1]


def test_segments_are_grouped_by_label_in_the_order_declared():
    segments = (Segment(1, "main", 3), Segment(2, "cfg", 2), Segment(2, "main", 0), Segment(-2, "main", 1))
    labels = context().labels(KVStep(segments=segments))
    assert list(labels) == ["main", "cfg"]
    assert labels["main"].request_ids == (1, 2, -2)
    assert labels["main"].rows.tolist() == [5, 4, 8]
    assert labels["main"].spans.tolist() == [3, 0, 1]
    assert labels["main"].num_real == 2
    assert (labels["cfg"].request_ids, labels["cfg"].rows.tolist(), labels["cfg"].num_real) == ((2,), [4], 1)


def test_a_segment_of_a_stranger_is_a_key_error():
    with pytest.raises(KeyError):
        context().labels(KVStep(segments=(Segment(99, "main", 1),)))


def test_what_a_declaration_was_resolved_to_is_kept_with_it():
    segments, cache = (ONE, TWO), {}
    first = context(label_cache=cache).labels(KVStep(segments=segments))
    assert context(label_cache=cache).labels(SamplerStep(segments=segments)) is first
    assert context(label_cache=cache).labels(KVStep(segments=(TWO, ONE))) is not first


@pytest.mark.parametrize(
    ("spans", "pads", "num_plans", "tokens"),
    [
        ((3, 1, 0), True, 1, 16),  # the forward sees the whole bucket
        ((3, 1, 0), True, 2, 8),  # of which each of two labels has half
        ((3, 1, 0), False, 1, 4),  # or the real tokens alone
        ((0, 0, 0), True, 1, 0),  # a label that only reads has none
    ],
)
def test_tokens_as_the_forward_sees_them(spans, pads, num_plans, tokens):
    ctx = context(spans, slot_lease=SlotLease(0, BucketKey("prefill", 3, 16)), pads_tokens=pads)
    assert ctx.padded_tokens(ctx.spans, num_plans) == tokens


def test_an_eager_step_has_its_real_tokens_alone():
    ctx = context(pads_tokens=True)
    assert ctx.padded_tokens(ctx.spans) == 5


# Answers to an admission


def test_an_admission_runs_unless_it_says_otherwise():
    assert AdmitOutcome(ok=True, ready=True, reason=None) == ADMITTED
    not_ready = AdmitOutcome(ready=False)
    assert not_ready.ok
    assert not not_ready.ready


def test_reasons_have_their_published_fields():
    assert AllocationFailed("full", 3, "cfg", 7) == AllocationFailed(
        message="full", pages_short=3, label="cfg", request_id=7
    )
    assert RequestOffloading(7).request_id == 7
    assert AdmitRuntimeError("too long").request_id == -1, "the whole step's, unless it names one"
