"""Forks: a target is a copy in pages of its own, all or nothing, and only if the step commits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.kv.config import Fork, KVStep
from mstar.engine.resources.step import AllocationFailed, Segment, SubmoduleStep

from .drive import Rig

LABELS = ("main", "a", "b")


def write(rig, ctx, value):
    """Every new token's key and value become ``value``, as a forward would write them."""
    for plan in ctx.plan_results["kv_cache"].values():
        for layer in rig.kv.cache:
            flat = layer.view(-1, *layer.shape[-2:])
            flat[plan.key_index] = float(value)
            flat[plan.value_index] = -float(value)


class Driver:
    """One request whose streams hold known values, written step by step."""

    def __init__(self, pages=64):
        self.rig = Rig(pages=pages)
        self.rig.reserve(4, 32)
        self.rig.join(1, 0)
        self.rig.join(2, 1)
        self.rig.run([2], [5], lambda rig, ctx: write(rig, ctx, 99))
        self.value = 0

    def step(self, spans, **options):
        segments = tuple(Segment(1, label, span) for label, span in spans.items())
        return SubmoduleStep({"kv_cache": KVStep(**options)}, segments=segments)

    def run(self, spans, **options):
        self.value += 1
        self.rig.run([1], [0], lambda rig, ctx: write(rig, ctx, self.value), step=self.step(spans, **options))
        return self.value

    def stream(self, label):
        return int(self.rig.kv._streams.of(label, np.array([0]))[0])

    def content(self, label):
        kv, stream = self.rig.kv, self.stream(label)
        pages = torch.from_numpy(kv.page_table[stream].astype(np.int64))
        keys, values = (kv.cache[:, pages, side].flatten(1, 2)[:, : kv.stored_len[stream]] for side in (0, 1))
        assert torch.equal(keys, -values)
        assert (keys == keys[:1, :, :1, :1]).all()
        return keys[0, :, 0, 0].int().tolist()

    def state(self):
        kv = self.rig.kv
        return [(self.content(label), kv.page_table[self.stream(label)].tolist()) for label in LABELS], kv.free_pages


def test_a_pre_fork_happens_before_the_steps_tokens_and_a_post_fork_after_them():
    driver = Driver()
    driver.run({"main": 6})
    driver.run({"main": 3, "a": 2}, pre_forks=(Fork(1, "main", "a"),), post_forks=(Fork(1, "main", "b"),))
    assert driver.content("main") == driver.content("b") == [1] * 6 + [2] * 3
    assert driver.content("a") == [1] * 6 + [2] * 2
    driver.run({"main": 1, "b": 1})
    assert driver.content("main")[-1] == driver.content("b")[-1] == 3
    assert driver.content("a") == [1] * 6 + [2] * 2


def test_a_target_holds_no_page_of_its_source():
    driver = Driver()
    driver.run({"main": 6}, post_forks=(Fork(1, "main", "a"),))
    driver.run({"main": 0}, pre_forks=(Fork(1, "main", "b"),))
    kv = driver.rig.kv
    held = [set(kv.page_table[driver.stream(label), :2].tolist()) for label in LABELS]
    assert len(set.union(*held)) == 6


def test_forks_follow_each_other_in_order():
    driver = Driver()
    driver.run({"main": 5})
    driver.run({"a": 2})
    driver.run({"main": 1}, pre_forks=(Fork(1, "a", "b"), Fork(1, "main", "a")))
    assert (driver.content("b"), driver.content("a")) == ([2, 2], [1] * 5)
    driver.run({"main": 1}, post_forks=(Fork(1, "main", "a"), Fork(1, "a", "b")))
    assert driver.content("main") == driver.content("a") == driver.content("b") == [1] * 5 + [3, 4]


def test_two_streams_may_change_places():
    driver = Driver()
    driver.run({"main": 5})
    driver.run({"a": 9})
    driver.run({"main": 0}, pre_forks=(Fork(1, "main", "b"), Fork(1, "a", "main"), Fork(1, "b", "a")))
    assert (driver.content("main"), driver.content("a")) == ([2] * 9, [1] * 5)


def test_what_a_target_held_before_is_freed():
    driver = Driver()
    driver.run({"main": 5, "a": 20, "b": 20})
    driver.run({"main": 0}, pre_forks=(Fork(1, "main", "a"),), post_forks=(Fork(1, "main", "b"),))
    assert driver.rig.kv.free_pages == driver.rig.kv.num_usable_pages - 3 * 2 - 2
    driver.rig.leave(1)
    driver.rig.leave(2)
    assert driver.rig.kv.free_pages == driver.rig.kv.num_usable_pages


def test_a_step_without_commit_forks_what_was_stored():
    driver = Driver()
    driver.run({"main": 5})
    driver.run({"main": 9}, commit=False, post_forks=(Fork(1, "main", "a"),))
    assert driver.content("a") == [1] * 5
    assert driver.rig.kv.num_pages[driver.stream("a")] == 2


@pytest.mark.parametrize("free", range(8))
def test_admission_reserves_copies_and_growth_or_takes_nothing(free):
    driver = Driver(pages=1 + 2 + 2 + free)
    driver.run({"main": 6})
    before = driver.state()
    # a: a copy of 6 tokens that grows to 9: 3 pages.  main grows to 9: 1.  b: a copy of 9: 3.
    forks = {"pre_forks": (Fork(1, "main", "a"),), "post_forks": (Fork(1, "main", "b"),)}
    step = driver.step({"main": 3, "a": 3}, **forks).steps["kv_cache"]
    outcome = driver.rig.kv.admit(step, driver.rig.context([1], [0]))
    assert outcome.ok == (free >= 7)
    if not outcome.ok:
        assert isinstance(outcome.reason, AllocationFailed)
        assert outcome.reason.pages_short > 0
        assert driver.state() == before
    driver.rig.kv.check_pages()


@pytest.mark.parametrize("end", ["clear", "abandon", "leave", "again"])
def test_a_step_that_does_not_commit_leaves_its_forks_undone(end):
    driver = Driver()
    driver.run({"main": 6, "a": 3})
    before = driver.state()
    rig = driver.rig
    forks = {"pre_forks": (Fork(1, "main", "a"), Fork(1, "a", "b")), "post_forks": (Fork(1, "b", "main"),)}
    step = driver.step({"main": 1, "a": 5}, **forks).steps["kv_cache"]
    ctx = rig.context([1], [0], is_preplan=end == "clear")
    assert rig.kv.admit(step, ctx).ok
    taken = rig.kv.free_pages
    ctx.plan_results["kv_cache"] = rig.kv.plan(step, ctx)
    if end == "clear":
        rig.kv.clear_preplan()
    elif end == "abandon":
        rig.kv.abandon(step, ctx)
    elif end == "again":
        assert rig.kv.admit(step, ctx).ok
        assert rig.kv.free_pages == taken, "a re-driven step takes nothing more"
        rig.kv.abandon(step, ctx)
    else:
        rig.leave(1)
        rig.leave(2)
        assert rig.kv.free_pages == rig.kv.num_usable_pages
        return
    rig.kv.check_pages()
    assert driver.state() == before


def test_a_staged_fork_reads_its_source_when_it_is_promoted():
    driver = Driver()
    driver.run({"main": 6})
    rig = driver.rig
    step = driver.step({"a": 1}, pre_forks=(Fork(1, "main", "a"),)).steps["kv_cache"]
    ahead = rig.context([1], [0], is_preplan=True)
    assert rig.kv.admit(step, ahead).ok
    rig.kv.plan(step, ahead)
    rig.kv.cache[:] *= 7  # what the step before was still writing
    ctx = rig.context([1], [0])
    ctx.plan_results["kv_cache"] = rig.kv.promote_preplan(step, ctx)
    write(rig, ctx, 5)
    rig.kv.commit(step, ctx)
    rig.kv.check_pages()
    assert driver.content("a") == [7] * 6 + [5]


def test_forks_of_padding_rows_do_nothing():
    rig = Rig()
    rig.kv.ingest_request(-2, 8, None)
    step = SubmoduleStep({"kv_cache": KVStep(pre_forks=(Fork(-2, "main", "a"),))})
    rig.run([], [1], step=step, padding=1)
    assert rig.kv.free_pages == rig.kv.num_usable_pages


def test_a_fork_of_an_unknown_request_is_a_key_error_and_one_onto_itself_is_refused():
    driver = Driver()
    step = driver.step({"main": 1}, pre_forks=(Fork(7, "main", "a"),)).steps["kv_cache"]
    with pytest.raises(KeyError):
        driver.rig.kv.admit(step, driver.rig.context([1], [0]))
    with pytest.raises(ValueError, match="another label than its source 'main'"):
        Fork(1, "main", "main")


FORKS = st.lists(
    st.permutations(LABELS).map(lambda labels: Fork(1, labels[0], labels[1])), max_size=3, unique_by=lambda f: f.target
).map(tuple)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from(LABELS), st.integers(0, 6), min_size=1), FORKS, FORKS, st.booleans()),
        max_size=8,
    )
)
def test_streams_hold_what_a_model_of_lists_holds(steps):
    driver = Driver(pages=300)
    model = {label: [] for label in LABELS}
    for spans, pre, post, is_committed in steps:
        value = driver.run(spans, pre_forks=pre, post_forks=post, commit=is_committed)
        for fork in pre:
            model[fork.target] = list(model[fork.source])
        for label, span in spans.items() if is_committed else ():
            model[label] += [value] * span
        for fork in post:
            model[fork.target] = list(model[fork.source])
        assert {label: driver.content(label) for label in LABELS} == model
