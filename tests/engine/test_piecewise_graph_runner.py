from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.accelerator_graph_config import PiecewiseCaptureShape
from mstar.engine.batch import Batch
from mstar.engine.piecewise_graph_runner import REGION_WALK
from mstar.engine.piecewise_output import PiecewiseOutput
from mstar.engine.resources.step import BucketKey, SlotLease

from .toy import expected, next_token, request
from .toy_regions import WIDTH, RegionOptions, RegionSubmodule, make_regions


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def regions_of(engine):
    return engine._nodes["LLM"].regions


def core_of(engine):
    return regions_of(engine)["core"]


def ingested(engine, ids_by_request):
    infos = [request(i, ids) for i, ids in ids_by_request.items()]
    for info in infos:
        engine.ingest(info)
    return infos


# Choice

ENGINE, _, TOY = make_regions()


@pytest.mark.parametrize(
    ("bs", "tokens", "chosen"), [(1, 16, (1, 16)), (1, 17, (1, 32)), (3, 10, (4, 16)), (2, 33, None), (5, 10, None)]
)
def test_a_packed_region_takes_the_tightest_tokens_then_rows(bs, tokens, chosen):
    core = core_of(ENGINE)
    lease = core.lease_slot(bs, tokens, 0)
    assert lease == (chosen and SlotLease(0, BucketKey(REGION_WALK, *chosen, "LLM_core")))
    assert core.can_run(bs, tokens) == (chosen is not None)


def test_a_packed_region_is_not_found_without_its_tokens():
    assert not core_of(ENGINE).can_run(1)
    assert core_of(ENGINE).lease_slot(1) is None


@pytest.mark.parametrize(("bs", "chosen"), [(1, 1), (2, 2), (3, 4), (5, None)])
@pytest.mark.parametrize("tokens", [None, 1000])
def test_a_batched_region_is_found_from_its_rows_alone(bs, chosen, tokens):
    lease = regions_of(ENGINE)["side"].lease_slot(bs, tokens)
    assert lease == (chosen and SlotLease(0, BucketKey(REGION_WALK, chosen, chosen * WIDTH, "LLM_side")))


@given(bs=st.integers(1, 5), tokens=st.integers(1, 40))
def test_the_chosen_shape_dominates_and_no_smaller_one_does(bs, tokens):
    core = core_of(ENGINE)
    lease = core.lease_slot(bs, tokens)
    fitting = [k for k in core.buckets if k.bs >= bs and k.num_tokens >= tokens]
    assert (None if lease is None else lease.bucket) == min(fitting, key=lambda k: (k.num_tokens, k.bs), default=None)


def test_a_region_has_more_slots_than_one_only_for_a_double_buffered_resource(monkeypatch):
    assert {label: region.num_slots for label, region in regions_of(ENGINE).items()} == {"core": 1, "side": 1}
    monkeypatch.setattr(type(TOY), "force_double_buffer", True)
    engine, _, _ = make_regions()
    assert {label: region.num_slots for label, region in regions_of(engine).items()} == {"core": 2, "side": 1}
    core = core_of(engine)
    core.set_slot(3)
    assert core.lease_slot(1, 1).slot == 1
    assert core.lease_slot(1, 1, slot=2).slot == 0


# Capture


def test_shapes_are_captured_largest_first_over_their_own_static_inputs():
    engine, submodule, _ = make_regions()
    calls = submodule.region.seen
    per_shape = 3  # two warm-ups and the capture
    sizes = [call.static_inputs["x"].numel() for call in calls]
    assert sizes == [n for n in (32, 16) * 3 for _ in range(per_shape)]
    assert [len(call.engine_inputs.request_ids) for call in calls[:: 2 * per_shape]] == [4, 2, 1]
    assert len({call.static_inputs["x"].data_ptr() for call in calls}) == 6
    assert all(call.kwargs == {"scale": 2} and call.resources["toy"] is engine.resources["toy"] for call in calls)


def test_capture_leaves_no_state_and_padding_ids_are_the_region_s_own():
    engine, _, toy = make_regions()
    assert not toy.length.any()
    assert len(set(toy.requests)) == len(toy.requests)
    assert all(i <= -2 and row >= engine.capacity for i, row in toy.requests.items())


def test_padding_rows_of_a_packed_region_give_their_pages_up_and_those_of_a_batched_one_keep_them():
    class Batched(RegionSubmodule):
        """Region ``side`` owns the toy resource too."""

        def get_piecewise_accelerator_graph_configs(self, device):
            configs = super().get_piecewise_accelerator_graph_configs(device)
            configs["side"].declare_step = configs["core"].declare_step
            return configs

    _, _, toy = make_regions(submodule=Batched(RegionOptions()))
    ends = {"core": [], "side": []}  # what each region's captures leave of its padding rows, in the order of capture
    label_of = {}
    for name, argument in toy.calls:
        if name == "plan" and argument.graph_walk == REGION_WALK:
            label_of[argument.padded_request_ids] = argument.slot_lease.bucket.cg_key_info.removeprefix("LLM_")
        elif name == "reset" and argument[0] in label_of:
            ends[label_of[argument[0]]].append(argument[2])
    per_shape = [False, False]  # after each warm-up
    assert ends == {"core": [*per_shape, True] * 6, "side": [*per_shape, False] * 3}


@pytest.mark.parametrize("call", [0, 2])
def test_one_failing_shape_is_dropped_and_the_rest_work(caplog, call):
    calls = []

    def hook(region_call):
        if region_call.static_inputs["x"].numel() == 32 and len(region_call.engine_inputs.request_ids) == 2:
            calls.append(region_call)
            if len(calls) == call + 1:
                raise RuntimeError("capture broke")

    options = RegionOptions(hook=hook)
    with caplog.at_level(logging.ERROR):
        engine, submodule, _ = make_regions(options)
    options.hook = None
    assert core_of(engine).dropped_buckets == [BucketKey(REGION_WALK, 2, 32, "LLM_core")]
    assert f"dropped LLM_core: {REGION_WALK}[bs=2,tokens=32" in caplog.text
    assert engine.dropped_buckets() == {"LLM": 1}
    assert core_of(engine).lease_slot(2, 20).bucket.bs == 4
    infos = ingested(engine, {0: [1] * 10, 1: [2] * 10})
    result = engine.exec(Batch("LLM", "score", infos))
    assert result.host["new_token"].tolist() == [next_token([1] * 10), next_token([2] * 10)]
    assert submodule.took == ["region"]


def test_a_region_without_a_graph_is_not_attached_and_the_forward_runs_eager():
    engine, submodule, _ = make_regions(backend=EagerBackend())
    assert regions_of(engine) == {}
    infos = ingested(engine, {0: [1, 2]})
    assert engine.exec(Batch("LLM", "score", infos)).host["new_token"].tolist() == [next_token([1, 2])]
    assert submodule.took == ["eager"]


def test_a_host_read_in_a_region_drops_it_in_strict_mode():
    engine, _, _ = make_regions(RegionOptions(hook=lambda call: call.static_inputs["x"].sum().item()))
    assert set(regions_of(engine)) == {"side"}
    assert engine.dropped_buckets() == {"LLM": 6}


# Replay

BACKENDS = {
    "eager": EagerBackend,
    "service": lambda: CpuGraphBackend(strict=False),
    "service-strict": lambda: CpuGraphBackend(strict=True),
    "captured-at-load": lambda: None,
}


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=5))
def test_a_region_gives_what_the_eager_branch_gives(name, rows):
    engine, submodule, toy = make_regions(backend=BACKENDS[name]())
    infos = ingested(engine, dict(enumerate(rows)))
    for _ in range(2):
        result = engine.exec(Batch("LLM", "score", infos))
        assert result.host["new_token"].tolist() == [next_token(ids) for ids in rows]
    fits = name != "eager" and len(rows) <= 4 and sum(map(len, rows)) <= 32
    assert submodule.took == ["region" if fits else "eager"] * 2
    assert [int(toy.length[info.row]) for info in infos] == [2 * len(ids) for ids in rows]
    assert [int(toy.last[info.row]) for info in infos] == [next_token(ids) for ids in rows]
    assert not toy.length[engine.capacity :].any()


def test_padding_never_changes_a_bystander():
    engine, _, toy = make_regions()
    bystander, *others = ingested(engine, {0: [9], 1: [5], 2: [6], 3: [7]})
    engine.exec(Batch("LLM", "score", [bystander]))
    before = int(toy.last[bystander.row]), int(toy.length[bystander.row])
    for rows in (1, 2, 3):
        engine.exec(Batch("LLM", "score", others[:rows]))
    assert (int(toy.last[bystander.row]), int(toy.length[bystander.row])) == before


def test_the_region_s_context_has_the_real_head_and_padded_rows():
    engine, _, toy = make_regions()
    infos = ingested(engine, {i: [1, 2] for i in range(3)})
    toy.calls.clear()
    engine.exec(Batch("LLM", "score", infos))
    (ctx,) = [ctx for name, ctx in toy.calls if name == "plan"]
    assert ctx.graph_walk == REGION_WALK
    assert ctx.request_ids == (0, 1, 2)
    assert ctx.spans.tolist() == [2, 2, 2, 0]
    assert ctx.padded_request_ids[3] <= -2
    assert ctx.rows[3] >= engine.capacity
    assert ctx.slot_lease.bucket == BucketKey(REGION_WALK, 4, 16, "LLM_core")
    assert ctx.is_packed
    assert ctx.pads_tokens
    resets = [call for name, call in toy.calls if name == "reset"]
    assert resets == [((ctx.padded_request_ids[3],), (int(ctx.rows[3]),), True)]


def test_a_resource_that_refuses_the_region_s_step_fails_the_step():
    engine, _, toy = make_regions(budget=3)
    infos = ingested(engine, {0: [1, 2, 3, 4]})
    result = engine.exec(Batch("LLM", "score", infos))
    assert "toy" in str(result.errors[0])
    assert not toy.length.any()


# Leases before the step


@pytest.mark.parametrize("early", [False, True])
def test_only_a_region_that_asks_for_it_is_leased_before_the_step(early):
    engine, submodule, toy = make_regions(RegionOptions(early=early))
    infos = ingested(engine, {0: [1, 2]})
    submodule.steps.clear()
    toy.calls.clear()
    engine.exec(Batch("LLM", "score", infos))
    assert submodule.took == ["region" if early else "eager"]
    assert list(submodule.steps[-1].keys()) == ([] if early else ["toy"])
    assert [name for name, _ in toy.calls].count("plan") == 1  # never declared twice


def test_can_lease_is_asked_after_a_hit_with_the_real_inputs():
    asked = []

    def can_lease(inputs):
        asked.append([row.input_seq_len for row in inputs])
        return len(inputs) > 1

    engine, submodule, _ = make_regions(RegionOptions(can_lease=can_lease))
    infos = ingested(engine, {0: [1, 2], 1: [3] * 40, 2: [4]})
    for rows in ([0], [0, 2], [1]):
        engine.exec(Batch("LLM", "score", [infos[i] for i in rows]))
    assert submodule.took == ["eager", "region", "eager"]
    assert asked == [[2], [2, 1]]


def test_an_error_of_can_lease_fails_the_batch():
    def can_lease(inputs):
        raise RuntimeError("no idea")

    engine, _, _ = make_regions(RegionOptions(can_lease=can_lease))
    infos = ingested(engine, {0: [1, 2]})
    assert "no idea" in str(engine.exec(Batch("LLM", "score", infos)).errors[0])


def test_no_region_is_leased_in_a_step_that_is_captured_whole():
    engine, submodule, _ = make_regions()
    infos = ingested(engine, {0: [1, 2]})
    assert engine.exec(Batch("LLM", "prefill", infos)).host["new_token"].tolist() == expected([1, 2], 0)
    assert list(submodule.steps[-1].keys()) == ["toy"]


# A runner's own interface


def test_inputs_are_copied_along_dim_0_and_the_tail_is_zeroed():
    side = regions_of(ENGINE)["side"]
    side.run({"x": torch.full((4, WIDTH), 9.0)}, real_bs=4)
    output = side.run({"x": torch.ones(3, WIDTH)}, real_bs=3)
    assert output["x"].tolist() == [[3.0] * WIDTH] * 3
    (capture,) = side._captures[4, 4 * WIDTH]
    assert capture.static["x"][3].tolist() == [0.0] * WIDTH


def test_an_unknown_input_is_ignored_and_named_once(caplog):
    side = regions_of(make_regions()[0])["side"]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            side.run({"x": torch.ones(1, WIDTH), "mask": torch.ones(1)}, real_bs=1)
    assert caplog.text.count("takes no input 'mask'") == 1


@pytest.mark.parametrize("shape", [(2, WIDTH), (1, WIDTH + 1), (1,), ()])
def test_an_input_that_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError, match="input 'x' has shape"):
        regions_of(ENGINE)["side"].run({"x": torch.ones(shape)}, real_bs=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "needs request_ids, seq_lens or real_bs"),
        ({"seq_lens": [40]}, RuntimeError, "no captured shape holds 1 rows"),
        ({"seq_lens": [1] * 5}, RuntimeError, "no captured shape holds 5 rows"),
        ({"seq_lens": [4], "real_bs": 2}, ValueError, "must have 2 entries"),
        ({"real_bs": 1}, RuntimeError, "no captured shape"),
        ({"request_ids": [0, 1], "real_bs": 1, "seq_lens": [3]}, ValueError, "real_bs=1 rows, but 2 request_ids"),
    ],
)
def test_run_refuses_what_it_cannot_place(arguments, error, message):
    with pytest.raises(error, match=message):
        core_of(ENGINE).run({"x": torch.ones(3, dtype=torch.int64)}, **arguments)


def test_without_request_ids_nothing_is_declared():
    engine, _, toy = make_regions()
    toy.calls.clear()
    output = core_of(engine).run({"x": torch.tensor([1, 2, 3])}, seq_lens=[3])
    assert output["doubled"].tolist() == [2, 4, 6]
    assert not [name for name, _ in toy.calls if name == "plan"]


def test_outputs_are_cut_to_real_rows_or_tokens():
    engine, _, _ = make_regions()
    ingested(engine, {0: [1], 1: [2], 2: [3]})
    output = core_of(engine).run({"x": torch.arange(6)}, [0, 1, 2], [1, 2, 3])
    assert output["token"].shape == (3,)
    assert output["doubled"].tolist() == [0, 2, 4, 6, 8, 10]
    assert set(output) == {"token", "doubled"}
    assert output.get("nothing") is None
    with pytest.raises(KeyError):
        output["nothing"]
    with pytest.raises(KeyError):
        output.get_view("nothing")


def test_a_clone_stays_and_a_view_is_valid_until_the_next_run():
    side = regions_of(ENGINE)["side"]
    output = side.run({"x": torch.ones(2, WIDTH)}, real_bs=2)
    clone, got, view = output["x"], output.get("x"), output.get_view("x")
    side.run({"x": torch.full((2, WIDTH), 5.0)}, real_bs=2)
    assert clone.tolist() == got.tolist() == [[3.0] * WIDTH] * 2
    assert view.tolist() == [[11.0] * WIDTH] * 2


@pytest.mark.parametrize(("is_packed", "size", "head"), [(True, 4, 3), (False, 4, 2), (True, 7, 7), (False, 7, 7)])
def test_a_packed_region_of_one_token_a_row_counts_tokens(is_packed, size, head):
    shape = PiecewiseCaptureShape(4, [1] * 4, 4)
    output = PiecewiseOutput({"x": torch.arange(size)}, shape, 2, 3, is_packed=is_packed)
    assert output["x"].tolist() == list(range(head))


def test_a_scalar_output_is_handed_on_whole():
    shape = PiecewiseCaptureShape(4, [1] * 4, 4)
    assert PiecewiseOutput({"x": torch.tensor(3)}, shape, 2, 2, is_packed=True)["x"].item() == 3


# Slots


@pytest.mark.parametrize("early", [True, False])
def test_a_region_replays_on_the_slot_of_the_step_it_is_part_of(monkeypatch, early):
    monkeypatch.setattr(type(TOY), "force_double_buffer", True)
    engine, submodule, toy = make_regions(RegionOptions(early=early))
    if not early:
        submodule.forward_batched = lambda walk, engine_inputs, input_ids: {
            0: engine_inputs.piecewise["core"].run({"x": input_ids}, (0,), [input_ids.numel()])
        }
    (info,) = ingested(engine, {0: [1, 2]})
    toy.calls.clear()
    for _ in range(3):
        assert not engine.exec(Batch("LLM", "score", [info])).errors
    contexts = [ctx for name, ctx in toy.calls if name == "plan" and ctx.graph_walk == REGION_WALK]
    assert [(ctx.slot, ctx.slot_lease.slot) for ctx in contexts] == [(0, 0), (1, 1), (0, 0)]
