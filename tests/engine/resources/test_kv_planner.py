"""Where a step's keys and values go: static buffers by label and slot, and the sink page behind the real tokens."""

import numpy as np
import pytest

from mstar.engine.resources.kv.config import KVStep
from mstar.engine.resources.kv.pages import SINK_PAGE
from mstar.engine.resources.step import Segment, SubmoduleStep

from .drive import Rig

PAGE, BUCKET = 4, 16
KV_ONLY = SubmoduleStep({"kv_cache": KVStep()})


@pytest.fixture
def rig():
    made = Rig(page_size=PAGE)
    made.reserve(4, BUCKET)
    made.join(1, 0)
    return made


def plans_of(rig, ctx):
    return ctx.plan_results["kv_cache"]


def pages_written(index):
    return index.numpy() // (2 * PAGE)


def test_what_a_padded_bucket_has_beyond_the_real_tokens_goes_to_the_sink_page(rig):
    for span in (BUCKET, 5, 0):  # behind a longer step, whose addresses must not stay in the tail
        plan = rig.run([1], [span], plans_of, step=KV_ONLY, slot=0, bucket_tokens=BUCKET, is_packed=True)["main"]
        assert plan.num_tokens == plan.key_index.numel() == (BUCKET if span else 0)
        assert (pages_written(plan.key_index[:span]) != SINK_PAGE).all()
        assert (pages_written(plan.key_index[span:]) == SINK_PAGE).all()
        assert (pages_written(plan.value_index[span:]) == SINK_PAGE).all()


def test_a_value_lies_one_page_of_tokens_behind_its_key(rig):
    plan = rig.run([1], [6], plans_of, step=KV_ONLY)["main"]
    assert (plan.value_index - plan.key_index).tolist() == [PAGE] * 6
    assert np.diff(plan.key_index[:PAGE].numpy()).tolist() == [1] * (PAGE - 1)


def test_labels_and_slots_share_no_addresses_and_buckets_of_a_slot_do(rig):
    def addresses(slot, label, spans=(2,)):
        step = SubmoduleStep({"kv_cache": KVStep(commit=False)}, (Segment(1, label, spans[0]),))
        plan = rig.run([1], list(spans), plans_of, step=step, slot=slot)[label]
        return plan.key_index.data_ptr()

    seen = {(slot, label): addresses(slot, label) for slot in (0, 1) for label in ("main", "cfg")}
    assert len(set(seen.values())) == 4
    assert addresses(0, "main", (1,)) == addresses(0, "main", (3,)) == seen[0, "main"]
