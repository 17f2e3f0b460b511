"""Captured decode steps that move lengths and positions on by themselves give what each request alone gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.kv.config import Retention
from mstar.engine.resources.step import Segment, SubmoduleStep

from .graph_session import Session

KNOBS = [(lengths, positions) for lengths in ("1", "0") for positions in ("1", "0")]


@pytest.fixture(params=KNOBS, ids=lambda knobs: f"lengths{knobs[0]}-rope{knobs[1]}", scope="module")
def knobs(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSTAR_KV_INGRAPH_LENGTHS", request.param[0])
        patch.setenv("MSTAR_INGRAPH_DECODE_ROPE", request.param[1])
        yield request.param


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), window=st.sampled_from([None, 1, 5]), stores_itself=st.booleans())
def test_any_order_of_joins_steps_failures_and_leaves_equals_each_request_alone(
    knobs, device, data, window, stores_itself
):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    session = Session(stores_itself, window, pages=400, device=device)
    free = list(range(8))
    slot = 0
    for rid in range(1, data.draw(st.integers(2, 14))):
        if len(session.requests) < 5 and data.draw(st.booleans(), "joins"):
            row = free.pop(data.draw(st.integers(0, len(free) - 1)))
            session.join(rid, row)
            session.eager([rid], [data.draw(st.integers(1, 9))])
        if not session.requests:
            continue
        live = sorted(session.requests)
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True), "batch")
        kind = data.draw(st.sampled_from(["decode"] * 4 + ["options", "fails", "eager", "packed", "leave"]))
        if kind == "decode":
            for _ in range(data.draw(st.integers(1, 7))):
                session.decode(chosen, slot)
                slot = data.draw(st.sampled_from([slot, 1 - slot]))
                if data.draw(st.booleans(), "ahead"):
                    session.plan_ahead(data.draw(st.sampled_from([chosen, live])), slot)
        elif kind == "options":
            options = {
                "commit": False,
                "advance": data.draw(st.integers(0, 3)),
                "pos_ids": data.draw(st.integers(0, 50)),
                "retention": Retention(data.draw(st.integers(0, 5)), data.draw(st.integers(0, 9))),
            }
            name = data.draw(st.sampled_from(sorted(options)))
            session.decode(chosen, slot, **{name: options[name]})
        elif kind == "fails":
            session.decode(chosen, slot, fails=True)
        elif kind == "eager":
            session.eager(chosen, [data.draw(st.integers(1, 5)) for _ in chosen])
        elif kind == "packed":
            chosen = chosen[:4]
            session.through_packed(chosen, [1, *(data.draw(st.integers(0, 3)) for _ in chosen[1:])], slot)
        else:
            free.append(session.rig.row_of[chosen[0]])
            session.leave(chosen[0])


def prompted(*lengths, **options):
    session = Session(pages=200, **options)
    for rid, length in enumerate(lengths, start=1):
        session.join(rid, rid)
        session.eager([rid], [length])
    return session


def test_an_unchanged_batch_sends_nothing_but_new_pages(knobs):
    session = prompted(4, 6)
    kv, rope = session.rig.kv, session.rig.rope
    for slot in (0, 1):
        session.decode([1, 2], slot)
    state = kv._device_state
    before, pages = state.writes.count, int(kv.num_pages.sum())
    positions = rope._device.writes.count if rope._device else 0
    steps_with_pages = 0
    for i in range(12):
        session.decode([1, 2], i % 2)
        held = int(kv.num_pages.sum())
        steps_with_pages, pages = steps_with_pages + (held > pages), held
    if knobs[0] == "1":
        assert state.writes.count - before == steps_with_pages == 6
        assert torch.equal(state.lengths.values[[1, 2]], torch.tensor([18, 20], dtype=torch.int32))
    if knobs == ("1", "1"):
        assert rope._device.writes.count == positions
        assert rope._device.counters.values[[1, 2]].tolist() == [18, 20]


def test_padding_streams_never_move(knobs):
    session = prompted(4, 6)
    for i in range(5):
        session.decode([1, 2], i % 2)  # of three rows
    state = session.rig.kv._device_state
    assert state.lengths.values[8:].count_nonzero() == 0
    assert state.pages.table[8:].count_nonzero() == 0
    if session.rig.rope._device:
        assert session.rig.rope._device.counters.values[8:].count_nonzero() == 0


def test_a_step_repeats_where_its_slot_holds_it_and_its_graph_moves_all(knobs):
    session = prompted(4, 6)
    repeats = lambda slot: session.rig.runner.repeats(  # noqa: E731
        *reversed(session.decode_step([1, 2], slot, {}))
    )
    assert not repeats(0)
    session.decode([1, 2], 0)
    assert repeats(0) is (knobs == ("1", "1"))
    assert not repeats(1), "the other slot's buffers do not hold it"
    session.decode([1, 2], 1)
    assert repeats(0) is repeats(1) is (knobs == ("1", "1"))
    session.decode([1], 0)
    assert not repeats(0)
    assert repeats(1) is (knobs == ("1", "1"))
    session.decode([1, 2], 0)
    session.through_packed([1, 2], [1, 3], 0)
    assert not repeats(0)
    session.decode([1, 2], 0, pos_ids=5)
    assert not repeats(0)


def test_what_a_failed_step_moved_is_sent_again(knobs):
    session = prompted(4, 6)
    session.decode([1, 2], 0)
    session.decode([1, 2], 1, fails=True)
    session.decode([1, 2], 1)
    session.decode([2], 0)


def test_a_step_that_was_admitted_and_never_ran_leaves_its_rows_right(knobs):
    session = prompted(4, 6)
    session.decode([1, 2], 0)
    ctx, step = session.decode_step([1, 2], 1, {})
    session.plan(step, ctx)
    session.rig.runner.abandon(step, ctx)
    session.decode([1, 2], 1)


def test_a_captured_step_without_attention_moves_no_length_on_the_device(knobs):
    session = prompted(4)
    session.decode([1], 0)
    ctx = session.rig.context([1], [1, 1], padding=1, slot=0)  # a bucket that was never captured
    step = session.step()
    session.plan(step, ctx)
    session.rig.runner.commit(step, ctx)
    request = session.requests[1]
    pages = session.rig.kv.page_table[1, : session.rig.kv.num_pages[1]].astype(int)
    stored = int(session.rig.kv.stored_len[1])
    layers = session.rig.kv.cache[:, pages]
    request.k, request.v = (layers[:, :, i].flatten(1, 2)[:, :stored] for i in (0, 1))
    request.position += 1
    session.decode([1], 0)


def test_a_cached_prefix_reaches_the_device(knobs):
    session, prompt = Session(pages=200), list(range(10))
    session.join(1, 1, prompt)
    session.eager([1], [10])
    first = session.requests[1]
    assert session.join(2, 5, prompt) == 8
    request = session.requests[2]
    request.k, request.v, request.position = first.k[:, :8], first.v[:, :8], 8
    for i in range(6):
        session.decode([2, 1], i % 2)


def test_more_labels_than_the_device_has_room_for_are_refused(knobs):
    session = prompted(4)
    rig = session.rig
    for label in ("a", "b", "c"):
        step = SubmoduleStep({key: session.step().get(key) for key in ("kv_cache", "attn")}, (Segment(1, label, 1),))
        session.plan(step, rig.context([1], [1]))
    step = SubmoduleStep({key: session.step().get(key) for key in ("kv_cache", "attn")}, (Segment(1, "d", 1),))
    with pytest.raises(RuntimeError, match="takes 4 labels"):
        session.plan(step, rig.context([1], [1]))
