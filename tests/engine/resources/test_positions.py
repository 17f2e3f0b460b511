"""Positions continue where a stream stands, in every scheme, and turn heads by the tables of their rotary rule."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.kv.config import Fork, KVStep
from mstar.engine.resources.positions.config import PositionConfig, PositionSpec, PositionStep
from mstar.engine.resources.positions.rotary import Positions
from mstar.engine.resources.step import Segment, SubmoduleStep
from mstar.kernels import rope
from mstar.kernels.rope_frequencies import dynamic_bases, frequencies_of, inverse_frequencies

from .drive import CAPACITY, Rig

BLOCK = PositionConfig(scheme="block", block_step=3)
THREE_FOLD = PositionConfig(mrope_section=(2, 3, 3))
DYNAMIC = PositionConfig(rope_scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16})
YARN = PositionConfig(
    rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, rope_scale=1.5
)


def rig_of(config: PositionConfig | None = None, requests: int = 0) -> Rig:
    """A rig with requests 1, 2, ... on rows 1, 2, ..."""
    rig = Rig(positions=config)
    for rid in range(1, requests + 1):
        rig.join(rid, rid)
    return rig


def step_of(segments: list[tuple[int, str, int]] | None = None, kv: KVStep | None = None, **rope) -> SubmoduleStep:
    steps = {"kv_cache": kv or KVStep(), "rope": PositionStep(**rope)}
    return SubmoduleStep(steps, None if segments is None else tuple(Segment(*s) for s in segments))


def ids(label: str = "main"):
    return lambda rig, ctx: rig.rope.pos_ids(label).tolist()


def tables(rig, ctx, label="main"):
    """What heads of ones and of each dim alone turn into: the tables, bit for bit."""
    n = rig.rope.pos_ids(label).shape[-1]
    return rig.rope.rotate_heads(torch.eye(16).expand(n, 16, 16), label)


# Counters.


def test_positions_continue_per_request_in_batch_order() -> None:
    rig = rig_of(requests=2)
    assert rig.run([1], [3], ids()) == [0, 1, 2]
    assert rig.run([2, 1], [2, 1], ids()) == [0, 1, 3]
    assert rig.run([1, 2], [1, 1], ids()) == [4, 2]


def test_tokens_of_a_block_share_a_position_and_blocks_follow_by_their_step() -> None:
    rig = rig_of(BLOCK, requests=2)
    assert rig.run([1, 2], [3, 1], ids()) == [0, 0, 0, 0]
    assert rig.run([2, 1], [1, 2], ids()) == [3, 3, 3]
    rig.run([1, 2], [0, 1])
    assert rig.run([1, 2], [1, 1], ids()) == [6, 9], "a segment without tokens is no block"


def test_padding_rows_stay_at_zero() -> None:
    rig = rig_of(requests=1)
    rig.reserve(4, 4)
    for expected in ([0, 0, 0], [1, 0, 0], [2, 0, 0]):
        assert rig.run([1], [1, 1, 1], ids(), padding=2, slot=0) == expected
    assert not rig.rope.next_position[CAPACITY:].any()


@pytest.mark.parametrize("config", [None, BLOCK])
def test_advance_overrides_how_far_a_row_moves(config: PositionConfig | None) -> None:
    rig = rig_of(config, requests=2)
    rig.run([1, 2], [3, 1], step=step_of(advance=(2, 7)))
    assert rig.run([1, 2], [1, 1], ids()) == [2, 7]


def test_a_row_starts_at_zero_for_its_next_owner_only() -> None:
    rig = rig_of()
    rig.join(1, 0)
    rig.run([1], [3])
    rig.join(1, 0)
    assert rig.run([1], [1], ids()) == [3]
    rig.leave(1)
    rig.join(2, 0)
    assert rig.run([2], [1], ids()) == [0]


def test_a_cached_prefix_is_where_the_first_step_begins() -> None:
    rig = rig_of(requests=2)
    rig.rope.apply_cached_prefix(1, 1, 8)
    rig.rope.apply_cached_prefix(2, 2, 0)
    assert rig.run([1, 2], [2, 2], ids()) == [8, 9, 0, 1]


@pytest.mark.parametrize(
    ("config", "safe"), [(None, True), (YARN, True), (THREE_FOLD, True), (BLOCK, False), (DYNAMIC, False)]
)
def test_a_prefix_may_be_skipped_where_it_says_all_about_later_positions(
    config: PositionConfig | None, safe: bool
) -> None:
    assert rig_of(config).rope.prefix_skip_safe is safe


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=8),
    is_block=st.booleans(),
)
def test_counters_are_the_sum_of_what_was_committed(steps: list[list[int]], is_block: bool) -> None:
    rig = rig_of(BLOCK if is_block else None, requests=3)
    at = np.zeros(3, int)
    for spans in steps:
        expected = [a + (0 if is_block else i) for a, span in zip(at, spans, strict=True) for i in range(span)]
        assert rig.run([1, 2, 3], spans, ids()) == expected
        at += np.where(np.array(spans) > 0, 3, 0) if is_block else spans
    assert rig.rope.next_position[1:4].tolist() == at.tolist()


# Labels and forks.


def test_every_label_of_a_request_counts_for_itself() -> None:
    rig = rig_of(requests=2)
    segments = [(1, "main", 2), (1, "guide", 1), (2, "main", 1), (2, "guide", 3)]

    def both(rig, ctx):
        return ids()(rig, ctx), ids("guide")(rig, ctx)

    assert rig.run([1, 2], [2, 1], both, step_of(segments)) == ([0, 1, 0], [0, 0, 1, 2])
    again = [(1, "main", 1), (1, "guide", 1), (2, "main", 1), (2, "guide", 1)]
    assert rig.run([1, 2], [1, 1], both, step_of(again)) == ([2, 1], [1, 3])
    rig.leave(1)
    rig.join(3, 1)
    assert rig.run([3], [1], both, step_of([(3, "main", 1), (3, "guide", 1)])) == ([0], [0])


def test_combined_labels_are_planned_end_to_end() -> None:
    rig = rig_of(requests=2)
    segments = [(1, "main", 2), (2, "main", 1), (1, "guide", 1), (2, "guide", 2)]
    kv = KVStep(combined_labels={("guide", "main"): "both"})
    assert rig.run([1, 2], [2, 1], ids("both"), step_of(segments, kv)) == [0, 0, 1, 0, 1, 0]
    assert rig.run([1, 2], [2, 1], ids("both"), step_of(segments, kv)) == [1, 2, 3, 2, 3, 1]


def test_advance_names_a_number_per_segment() -> None:
    rig = rig_of(requests=1)
    rig.run([1], [2], step=step_of([(1, "main", 2), (1, "guide", 1)], advance=(5, 9)))
    segments = [(1, "guide", 1), (1, "main", 1)]
    assert rig.run([1], [1], lambda *a: (ids()(*a), ids("guide")(*a)), step_of(segments)) == ([5], [9])


def test_forks_copy_a_counter_before_the_step_or_after_its_commit() -> None:
    rig = rig_of(requests=1)
    rig.run([1], [4])
    pre, post = (Fork(1, "main", "before"),), (Fork(1, "main", "after"),)
    kv = KVStep(pre_forks=pre, post_forks=post)
    segments = [(1, "main", 2), (1, "before", 1)]
    step = step_of(segments, kv, pre_forks=pre, post_forks=post)
    assert rig.run([1], [2], lambda *a: (ids()(*a), ids("before")(*a)), step) == ([4, 5], [4])
    assert rig.run([1], [1], ids("after"), step_of([(1, "after", 1)])) == [6]
    assert rig.run([1], [1], ids("before"), step_of([(1, "before", 1)])) == [5]


def test_a_failed_step_takes_its_forks_back() -> None:
    rig = rig_of(requests=1)
    rig.run([1], [4])
    forks = (Fork(1, "main", "guide"),)
    step, ctx = step_of([(1, "guide", 1)], KVStep(pre_forks=forks), pre_forks=forks), rig.context([1], [1])
    before = rig.rope.next_position[1]
    assert rig.runner.admit(step, ctx)[0].ok
    rig.runner.plan(step, ctx)
    assert rig.rope.pos_ids("guide").tolist() == [4]
    rig.runner.abandon(step, ctx)
    assert rig.rope.next_position.sum() == before, "only main's counter is left"


def test_a_step_that_fails_while_it_is_planned_takes_its_forks_back_too() -> None:
    rig = rig_of(requests=1)
    rig.kv.build_accelerator_graph_buffers([], 4, 16)
    rig.run([1], [4])
    forks = (Fork(1, "main", "guide"),)
    step, ctx = step_of([(1, "guide", 2)], KVStep(pre_forks=forks), pre_forks=forks), rig.context([1], [2], slot=0)
    assert rig.runner.admit(step, ctx)[0].ok
    with pytest.raises(ValueError, match="broadcast"):  # no static buffers of positions were reserved
        rig.runner.plan(step, ctx)
    assert rig.rope.next_position.sum() == 8
    rig.runner.abandon(step, ctx)
    assert rig.rope.next_position.sum() == 4


# Explicit ids.


def test_explicit_ids_stand_in_for_the_counters_which_move_all_the_same() -> None:
    rig = rig_of(requests=2)
    step = step_of(pos_ids=torch.tensor([7, 7, 40]), advance=(8, 41))
    assert rig.run([1, 2], [2, 1], ids(), step) == [7, 7, 40]
    assert rig.run([1, 2], [1, 1], ids()) == [8, 41]
    assert rig.run([1], [2], ids(), step_of(pos_ids={"main": torch.tensor([1, 0])})) == [1, 0]
    assert rig.run([1], [1], ids()) == [11]


def test_ids_of_several_labels_come_by_label() -> None:
    rig = rig_of(requests=1)
    segments = [(1, "main", 2), (1, "guide", 1)]
    step = step_of(segments, pos_ids={"guide": torch.tensor([9])})
    assert rig.run([1], [2], lambda *a: (ids()(*a), ids("guide")(*a)), step) == ([0, 1], [9])


TWO = [(1, "main", 1), (1, "guide", 1)]


@pytest.mark.parametrize(
    ("config", "segments", "rope", "message"),
    [
        (None, TWO, {"pos_ids": torch.zeros(1)}, "pos_ids must name their label: main, guide"),
        (None, None, {"pos_ids": {"guide": torch.zeros(1)}}, "label 'guide'; planned are main"),
        (None, None, {"pos_ids": torch.zeros(2)}, r"must have shape \[1\], got \[2\]"),
        (None, None, {"pos_ids": torch.zeros(3, 1)}, r"must have shape \[1\], got \[3, 1\]"),
        (THREE_FOLD, None, {"pos_ids": torch.zeros(3)}, r"must have shape \[1\] or \[3, 1\], got \[3\]"),
        (None, None, {"advance": (1, 2)}, "each of 1 segments, got 2"),
        (None, TWO, {"advance": (1,)}, "each of 2 segments, got 1"),
    ],
)
def test_ids_and_moves_that_do_not_fit_are_refused(config, segments, rope, message) -> None:
    rig = rig_of(config, requests=1)
    with pytest.raises(ValueError, match=message):
        rig.run([1], [1], step=step_of(segments, **rope))


def test_an_image_takes_three_axes_and_fewer_positions_than_tokens() -> None:
    rig = rig_of(THREE_FOLD, requests=1)
    image = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 2, 2], [0, 1, 2, 1, 2]])  # a word, then 2 by 2 patches
    assert rig.run([1], [5], ids(), step_of(pos_ids=image, advance=(3,))) == image.tolist()
    assert rig.run([1], [2], ids()) == [[3, 4]] * 3, "text goes on along all axes"
    assert rig.run([1], [1], ids(), step_of(pos_ids=torch.tensor([9]))) == [[9]] * 3


# Tables.


@pytest.mark.parametrize("config", [PositionConfig(), YARN, DYNAMIC, PositionConfig(interleave=True, rotary_dim=8)])
def test_heads_turn_by_the_configured_rule(config: PositionConfig) -> None:
    rig = rig_of(config, requests=2)
    dim, scaling, theta = config.rotary_dim or 16, config.rope_scaling, config.rope_theta
    factor = 0.1 * np.log(4) + 1 if config is YARN else 1.0
    for spans in ([20, 3], [1, 1], [2, 20]):
        x = torch.randn(sum(spans), 3, 16)
        rotated = rig.run([1, 2], spans, lambda rig, ctx, x=x: rig.rope.rotate(x, x))
        at, starts = torch.tensor(rig.rope.pos_ids().tolist()), rig.rope.next_position[1:3]
        frequencies = inverse_frequencies(dim, theta, scaling) / config.rope_scale
        if config is DYNAMIC:
            rows = frequencies_of(torch.from_numpy(dynamic_bases(starts, dim, theta, scaling)), dim)
            frequencies = rows.repeat_interleave(torch.tensor(spans), 0)
        expected = rope.rotate(x, *rope.cos_sin(at, frequencies, config.interleave, factor=factor), config.interleave)
        assert all(torch.equal(half, expected) for half in rotated)


@pytest.mark.parametrize("ends", [(1, 511, 512, 513), (4000, 100), (32768,), (40000, 300)])
def test_tables_that_are_looked_up_are_those_that_would_be_computed(ends: tuple[int, ...]) -> None:
    rotary = rig_of().rope._rotary
    for end in ends:
        positions = torch.arange(max(end - 20, 0), end)
        computed = rotary.tables(Positions(positions, None))
        found = rotary.tables(Positions(positions, None, end=end))
        out = tuple(torch.empty_like(table) for table in computed)
        rotary.tables(Positions(positions, None, end=end), out)
        for each in (found, out):
            assert all(torch.equal(a, b) for a, b in zip(each, computed, strict=True))


def test_queries_and_keys_side_by_side_rotate_as_apart() -> None:
    rig = rig_of(requests=1)
    q, k = torch.randn(5, 6, 16), torch.randn(5, 2, 16)

    def both(rig, ctx):
        return torch.cat(rig.rope.rotate(q, k), 1), rig.rope.rotate_heads(torch.cat((q, k), 1))

    apart, together = rig.run([1], [5], both)
    assert torch.equal(apart, together)
    assert torch.equal(apart[0], torch.cat((q, k), 1)[0]), "position 0 is not turned"


def test_a_rope_dtype_of_its_own_is_what_tables_are_kept_in() -> None:
    x = torch.randn(6, 2, 16).bfloat16()
    wide, narrow = (rig_of(PositionConfig(rope_dtype=dtype), requests=1) for dtype in (torch.float32, torch.bfloat16))
    turned = [rig.run([1], [6], lambda rig, ctx: rig.rope.rotate_heads(x)) for rig in (wide, narrow)]
    assert [t.dtype for t in turned] == [torch.bfloat16] * 2
    at = rope.cos_sin(torch.arange(6), inverse_frequencies(16, 1e4, None), False)
    assert torch.equal(turned[0], rope.rotate(x, *at, False))
    assert torch.equal(turned[1], rope.rotate(x, *(table.bfloat16() for table in at), False))


# Leased steps.


def test_leased_positions_lie_at_their_slots_address_and_keep_their_tail() -> None:
    rig = rig_of(requests=2)
    rig.reserve(4, 16)

    def look(rig, ctx):
        seen = rig.rope.pos_ids()
        return seen.data_ptr(), seen.tolist()

    first, seen = rig.run([1, 2], [4, 3], look, slot=0, bucket_tokens=12, is_packed=True)
    assert seen == [0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0, 0]
    other, seen = rig.run([1, 2], [1, 1], look, slot=1, bucket_tokens=12, is_packed=True)
    assert other != first
    again, seen = rig.run([1, 2], [1, 1], look, slot=0, bucket_tokens=12, is_packed=True)
    assert again == first
    assert seen == [5, 4, 2, 3, 0, 1, 2, 0, 0, 0, 0, 0], "real tokens first, then what lay there"


@pytest.mark.parametrize(
    "config", [PositionConfig(), BLOCK, THREE_FOLD, DYNAMIC, YARN, PositionConfig(interleave=True)]
)
def test_tables_built_in_the_graph_have_the_bits_of_staged_ones(
    config: PositionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    for knob in "01":
        monkeypatch.setenv("MSTAR_INGRAPH_DECODE_ROPE", knob)
        rig = rig_of(config, requests=2)
        rig.reserve(4, 32)
        seen[knob] = [rig.run([1, 2], [15, 4], tables)]
        for slot in itertools.islice(itertools.cycle((0, 1)), 6):
            seen[knob].append(rig.run([1, 2], [1, 1, 1], tables, padding=1, slot=slot))
        seen[knob].append(rig.run([1, 2], [1, 1], tables))
        expected = {"staged_table_steps": 8} if knob == "0" else {"staged_table_steps": 2, "ingraph_table_steps": 6}
        assert rig.rope.counters == expected
    assert all(torch.equal(a, b) for a, b in zip(seen["0"], seen["1"], strict=True))


@pytest.mark.parametrize(
    ("spans", "context", "in_graph"),
    [
        ([1, 1], {"slot": 0}, True),
        ([1, 1], {}, False),
        ([1, 1], {"slot": 0, "is_packed": True}, False),  # its graph serves longer rows as well
        ([2, 1], {"slot": 0}, False),
    ],
)
def test_only_leased_decode_steps_build_their_tables_in_the_graph(
    spans: list[int], context: dict, in_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSTAR_INGRAPH_DECODE_ROPE", "1")
    rig = rig_of(requests=2)
    rig.reserve(4, 16)
    rig.run([1, 2], spans, tables, **context)
    assert rig.rope.counters == {"ingraph_table_steps" if in_graph else "staged_table_steps": 1}


# Planned ahead.


def planned_ahead(rig: Rig, step: SubmoduleStep, ctx) -> None:
    ctx.is_preplan = True
    assert rig.runner.pre_admit(step, ctx)[0].ok
    rig.runner.pre_plan(step, ctx)
    ctx.is_preplan = False


def test_a_step_planned_ahead_lands_in_its_own_slot_and_counts_when_taken() -> None:
    rig = rig_of(requests=2)
    rig.reserve(4, 16)
    rig.run([1, 2], [3, 2])
    step = step_of()
    running = rig.run([1, 2], [1, 1], lambda rig, ctx: rig.rope.pos_ids(), step=step, slot=0)
    ctx = rig.context([1, 2], [1, 1], slot=1)
    planned_ahead(rig, step, ctx)
    assert rig.rope.pos_ids().tolist() == running.tolist() == [3, 2], "the running step's stay"
    assert rig.rope.counters["staged_table_steps"] == 2
    assert rig.runner.admit(step, ctx, promoted=True)[0].ok
    rig.runner.plan(step, ctx, promoted=True)
    assert rig.rope.pos_ids().tolist() == [4, 3]
    assert rig.rope.counters["staged_table_steps"] == 3
    rig.runner.commit(step, ctx)
    assert rig.run([1, 2], [1, 1], ids()) == [5, 4]


def test_a_cleared_step_leaves_no_fork_and_no_count() -> None:
    rig = rig_of(requests=1)
    rig.reserve(4, 16)
    rig.run([1], [3])
    forks = (Fork(1, "main", "guide"),)
    step = step_of([(1, "main", 1), (1, "guide", 1)], KVStep(pre_forks=forks), pre_forks=forks)
    planned_ahead(rig, step, rig.context([1], [1], slot=1))
    assert rig.rope.next_position.sum() == 6
    rig.runner.clear()
    assert rig.rope.next_position.sum() == 3
    assert rig.rope.counters["staged_table_steps"] == 1


def test_counters_that_moved_since_are_seen_when_the_step_is_taken() -> None:
    rig = rig_of(requests=1)
    rig.reserve(4, 16)
    step, ctx = step_of(), rig.context([1], [1], slot=1)
    assert rig.runner.admit(step, ctx)[0].ok
    ctx.is_preplan = True
    rig.runner.pre_plan(step, ctx)
    ctx.is_preplan = False
    rig.rope.next_position[1] = 6
    rig.rope.promote_preplan(step.get("rope"), ctx)
    assert rig.rope.pos_ids().tolist() == [6]


def test_a_step_planned_anew_when_it_is_taken_gives_back_what_its_target_held_at_first() -> None:
    rig = rig_of(requests=1)
    rig.reserve(4, 16)
    rig.run([1], [7], step=step_of([(1, "main", 4), (1, "guide", 7)]))
    guide = int(rig.kv.streams(rig.context([1], [1]).labels(KVStep(segments=(Segment(1, "guide", 1),)))["guide"])[0])
    step, ctx = step_of([(1, "guide", 1)], pre_forks=(Fork(1, "main", "guide"),)), rig.context([1], [1], slot=1)
    assert rig.runner.admit(step, ctx)[0].ok
    ctx.is_preplan = True
    rig.runner.pre_plan(step, ctx)
    ctx.is_preplan = False
    assert rig.rope.next_position[guide] == 4
    rig.rope.next_position[[1, guide]] += 2  # both counters moved since
    rig.rope.promote_preplan(step.get("rope"), ctx)
    assert rig.rope.pos_ids("guide").tolist() == [6]
    rig.rope.abandon(step.get("rope"), ctx)
    assert rig.rope.next_position[guide] == 7


# Declarations.


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"scheme": "diagonal"}, "scheme must be one of sequential, block, got 'diagonal'"),
        ({"block_step": 0}, "block_step must be an integer >= 1, got 0"),
        ({"block_step": True}, "block_step must be an integer >= 1, got True"),
        ({"rope_scale": 0.0}, "rope_scale must be a finite number > 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number > 0"),
        ({"mrope_section": (8, 8)}, "mrope_section must be three integers"),
        ({"mrope_section": (8, -1, 1)}, "mrope_section must be three integers"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PositionConfig(**settings_)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PositionConfig(rotary_dim=15), "rotary_dim must be even"),
        (PositionConfig(rotary_dim=32), r"2\.\.16, got 32"),
        (PositionConfig(mrope_section=(2, 2, 2)), r"mrope_section must sum to 8, half of rotary_dim, got \(2, 2, 2\)"),
        (PositionConfig(rope_scaling={"type": "longrope", "factor": 2.0}), "longrope"),
        (PositionConfig(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "original_max_position_embeddings"),
        (PositionConfig(rope_scaling=dict(YARN.rope_scaling) | {"attention_factor": "1"}), "attention_factor"),
    ],
)
def test_what_cannot_be_rotated_is_refused_at_load(config: PositionConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rig_of(config)


def test_settings_may_be_overridden_by_name() -> None:
    spec = PositionSpec("rope", {"LLM"}).apply_yaml_overrides(rope_theta=5.0, scheme="block")
    assert (spec.config.rope_theta, spec.config.scheme) == (5.0, "block")


def test_tables_behind_the_known_positions_stay() -> None:
    rotary = rig_of().rope._rotary
    positions = torch.tensor([7, 3, 900, 900])
    computed = rotary.tables(Positions(positions, None))
    out = tuple(torch.full_like(table, 5.0) for table in computed)
    found = rotary.tables(Positions(positions, None, end=8, num_known=2), out)
    for table, expected in zip(found, computed, strict=True):
        assert torch.equal(table[:2], expected[:2])
        assert (table[2:] == 5).all()
