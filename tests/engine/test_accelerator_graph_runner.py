from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.accelerator_graph_config import BatchedAcceleratorGraphConfig, PackedAcceleratorGraphConfig
from mstar.engine.batch import Batch
from mstar.engine.inputs import ARNodeInputs
from mstar.engine.resources.step import BucketKey, SlotLease

from .toy import ToyOptions, expected, generate, make_engine, request


def runner_of(engine):
    return engine._nodes["LLM"].runner


def make_runner(**options):
    engine, _, _ = make_engine(ToyOptions(**options))
    return runner_of(engine)


def padding_calls(toy):
    return [call for name, call in toy.calls if name == "reset"]


# Choice

PACKED = {"prefill_sizes": (1, 2, 4), "prefill_tokens": (64, 256)}


@pytest.mark.parametrize(("bs", "chosen"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, None)])
def test_decode_takes_the_tightest_batch_size(bs, chosen):
    runner = make_runner()
    bucket = runner.select_bucket("decode", bs, bs)
    assert bucket == (chosen and BucketKey("decode", chosen, chosen))
    assert runner.select_batched_bucket("decode", bs) == bucket


@pytest.mark.parametrize(
    ("bs", "tokens", "chosen"), [(3, 100, (4, 256)), (2, 64, (2, 64)), (2, 65, (2, 256)), (1, 300, None)]
)
def test_prefill_takes_the_tightest_tokens_then_rows(bs, tokens, chosen):
    bucket = make_runner(**PACKED).select_bucket("prefill", bs, tokens)
    assert bucket == (chosen and BucketKey("prefill", *chosen))


def test_packed_buckets_are_not_found_from_a_batch_size_alone():
    assert make_runner().select_batched_bucket("prefill", 1) is None


@pytest.mark.parametrize(("bs", "tokens", "equal"), [(2, 3, False), (2, 4, True), (2, 2, False)])
def test_a_batched_bucket_takes_only_rows_of_its_template_s_length(bs, tokens, equal):
    assert make_runner().select_bucket("decode", bs, tokens, equal_rows=equal) is None


def test_fit_is_compared_in_static_buffer_tokens():
    guided = PackedAcceleratorGraphConfig(
        capture_graph_walk="guided",
        capture_token_lengths=[64, 256],
        make_node_input=lambda n: ARNodeInputs(input_ids=torch.zeros(n, dtype=torch.int64), input_seq_len=n),
        capture_batch_sizes=[1],
        total_tokens_multiplier=2,
    )
    runner = make_runner(extra_configs=[guided])
    assert runner.select_bucket("guided", 1, 100) == BucketKey("guided", 1, 512)
    assert runner.select_bucket("guided", 1, 64) == BucketKey("guided", 1, 128)
    assert runner.max_packed_tokens_for("guided") == 256


@settings(max_examples=60, deadline=None)
@given(bs=st.integers(1, 6), tokens=st.integers(1, 300))
def test_the_chosen_bucket_dominates_and_no_smaller_one_does(bs, tokens):
    bucket = RUNNER.select_bucket("prefill", bs, tokens)
    fitting = [k for k in RUNNER.registered if k.graph_walk == "prefill" and k.bs >= bs and k.num_tokens >= tokens]
    if bucket is None:
        assert not fitting
    else:
        assert min(fitting, key=lambda k: (k.num_tokens, k.bs)) == bucket


RUNNER = make_runner(**PACKED)


@pytest.mark.parametrize("aliases", [None, [], ["talk"], ["talk", "decode"]])
def test_an_alias_finds_the_same_slots_and_the_lease_names_the_capture_walk(aliases):
    runner = make_runner(decode_aliases=aliases)
    assert runner.lease_slot("decode", 3, 1) == SlotLease(1, BucketKey("decode", 4, 4))
    assert runner.max_batch_size_for("decode") == 8
    if aliases:
        assert runner.lease_slot("talk", 3, 5, num_tokens=3) == SlotLease(1, BucketKey("decode", 4, 4))
        assert runner.max_batch_size_for("talk") == 8


def test_a_walk_that_does_not_cap_has_no_cap():
    assert make_runner(caps=False).max_batch_size_for("decode") is None


def test_batch_sizes_default_sort_and_lose_duplicates():
    runner = make_runner(decode_sizes=(), prefill_sizes=(4, 1, 4))
    sizes = [s.bucket.bs for s in runner.specs if s.bucket.graph_walk == "decode" and s.slot == 0]
    assert sizes == [64, 32, 16, 8, 4, 2, 1]
    assert [s.bucket.bs for s in runner.specs if s.bucket.graph_walk == "prefill" and s.slot == 0] == [4, 4, 1, 1]


def test_captures_are_made_largest_first_with_slots_in_order():
    order = [(s.bucket.bs, s.bucket.num_tokens, s.slot) for s in make_runner(**PACKED).specs]
    assert order == sorted(order, key=lambda o: (-o[0], -o[1], o[2]))


def test_key_info_tells_captures_apart():
    engine, submodule, _ = make_engine(ToyOptions(key_info="plain"))
    runner = runner_of(engine)
    assert runner.select_bucket("decode", 1, 1, "plain") == BucketKey("decode", 1, 1, "plain")
    assert runner.select_bucket("decode", 1, 1) is None
    info = request(0)
    engine.ingest(info)
    submodule.step_key_info = "full"
    error = engine.exec(Batch("LLM", "prefill", [info])).errors[0]
    assert "'full'" in str(error)
    assert "'plain'" in str(error)


def test_two_configurations_of_one_bucket_are_refused():
    twin = BatchedAcceleratorGraphConfig("decode", ARNodeInputs(), capture_batch_sizes=[2])
    with pytest.raises(ValueError, match=r"configurations 0 and 2 both capture decode\[bs=2"):
        make_engine(ToyOptions(extra_configs=[twin]))


# Capture


def test_warm_up_leaves_no_state_and_frees_padding_rows():
    engine, _, toy = make_engine()
    assert not toy.length.any()
    assert padding_calls(toy)[-1][2]
    assert all(i <= -2 for i in toy.requests)
    assert all(row >= engine.capacity for row in toy.requests.values())
    assert len(set(toy.requests.values())) == len(toy.requests) == 2 * (8 + 4)


def test_every_forward_of_warm_up_is_planned_anew_after_a_reset():
    _, submodule, toy = make_engine(ToyOptions(decode_sizes=(2,), prefill_sizes=(1,), prefill_tokens=(16,)))
    plans = [ctx for name, ctx in toy.calls if name == "plan"]
    assert submodule.forwards == 4 * 3  # 2 buckets on 2 slots: 2 warm-ups and the capture
    assert len(plans) == 4 * 3
    assert all(ctx.capture and ctx.num_real == 0 and ctx.slot_lease.slot == ctx.slot for ctx in plans)
    assert [free for _, _, free in padding_calls(toy)] == [False, False, True] * 4


def test_buffers_are_sized_before_anything_is_captured():
    _, _, toy = make_engine()
    assert toy.calls[0] == ("buffers", (8, 64))
    assert [name for name, _ in toy.calls].count("buffers") == 1


def test_serving_defaults_run_no_forward_at_load_and_capture_at_the_first_replay():
    engine, submodule, _ = make_engine(backend=CpuGraphBackend())
    assert submodule.forwards == 0
    info = request(0, [1])
    engine.ingest(info)
    assert generate(engine, [info], 3) == {0: expected([1], 3)}
    assert submodule.forwards == 4
    assert not engine.eager_steps


def fail_at(bucket, slot):
    def hook(walk, ids):
        if (walk, ids.numel()) == bucket:
            hook.seen += 1
            if hook.seen == slot + 1:
                raise RuntimeError("capture broke")

    hook.seen = 0
    return hook


@pytest.mark.parametrize("call", [0, 2, 3, 5])
def test_one_failing_capture_drops_its_bucket_whole_and_the_rest_work(call, caplog):
    engine, submodule, toy = make_engine(warm=False)
    submodule.hook = fail_at(("decode", 4), call)
    with caplog.at_level(logging.ERROR):
        engine.warm_up()
    submodule.hook = None
    runner = runner_of(engine)
    assert runner.dropped_buckets == [BucketKey("decode", 4, 4)]
    assert "captured 9 of 10 buckets" in caplog.text
    assert "capture broke" in caplog.text
    assert runner.select_bucket("decode", 3, 3) == BucketKey("decode", 8, 8)
    assert not toy.length.any()
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    assert generate(engine, infos, 3) == {i: expected([i + 1], 3) for i in range(3)}


def test_a_batch_whose_only_bucket_was_dropped_runs_eager():
    engine, submodule, _ = make_engine(warm=False)
    submodule.hook = fail_at(("decode", 8), 0)
    engine.warm_up()
    submodule.hook = None
    infos = [request(i, [i + 1]) for i in range(8)]
    for info in infos:
        engine.ingest(info)
    engine.exec(Batch("LLM", "decode", infos))
    assert engine.eager_steps["LLM", "decode", "dropped"] == 1
    assert engine.dropped_buckets() == {"LLM": 1}


def test_a_dropped_bucket_fails_the_start_where_graphs_are_required(monkeypatch):
    monkeypatch.setenv("MSTAR_REQUIRE_ACCELERATOR_GRAPHS", "1")
    make_engine()
    engine, submodule, _ = make_engine(warm=False)
    submodule.hook = fail_at(("decode", 4), 0)
    with pytest.raises(RuntimeError, match=r"captured 9 of 10 buckets, dropped decode\[bs=4"):
        engine.warm_up()


def test_a_host_read_in_the_forward_drops_the_bucket_in_strict_mode():
    engine, submodule, _ = make_engine(warm=False)
    submodule.hook = lambda walk, ids: ids.sum().item()
    engine.warm_up()
    assert len(runner_of(engine).dropped_buckets) == 10


def test_an_unsupported_device_warns_once_and_runs_eager(caplog):
    with caplog.at_level(logging.WARNING):
        engine, _, _ = make_engine(backend=EagerBackend())
    assert caplog.text.count("captures no graphs") == 1
    info = request(0, [1])
    engine.ingest(info)
    generate(engine, [info], 2)
    assert engine.eager_steps == {("LLM", "prefill", "device"): 1, ("LLM", "decode", "device"): 2}
    assert engine.max_batch_size("LLM", "decode") == 8


def test_a_malformed_compile_mode_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("MSTAR_GRAPH_COMPILE_MODE", "fastest")
    with pytest.raises(ValueError, match="MSTAR_GRAPH_COMPILE_MODE='fastest'"):
        make_engine()


# Replay


def test_slots_rotate_per_node_over_walks_and_buckets():
    engine, _, toy = make_engine()
    infos = [request(i, [1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    toy.calls.clear()
    for walk, rows in (("prefill", 3), ("decode", 3), ("decode", 1), ("decode", 3), ("prefill", 2)):
        engine.exec(Batch("LLM", walk, infos[:rows]))
    plans = [ctx for name, ctx in toy.calls if name == "plan"]
    assert [ctx.slot_lease.slot for ctx in plans] == [0, 1, 0, 1, 0]


def test_padding_rows_are_the_slot_s_own_and_are_reset_after_the_step():
    engine, _, toy = make_engine()
    infos = [request(i, [1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    toy.calls.clear()
    for _ in range(4):
        engine.exec(Batch("LLM", "decode", infos))
    plans = [ctx for name, ctx in toy.calls if name == "plan"]
    tails = [ctx.padded_request_ids[3:] for ctx in plans]
    assert all(ctx.request_ids == (0, 1, 2) and ctx.spans.tolist() == [1] * 4 for ctx in plans)
    assert tails[0] == tails[2] != tails[1] == tails[3]
    assert all(ctx.rows[3] >= engine.capacity for ctx in plans)
    assert [(ids, free) for ids, _, free in padding_calls(toy)] == [(tail, False) for tail in tails]
    assert all(toy.length[ctx.rows[3:]].sum() == 0 for ctx in plans)


def test_packed_padding_rows_have_no_tokens():
    engine, _, toy = make_engine()
    infos = [request(i, [1, 2]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    toy.calls.clear()
    result = engine.exec(Batch("LLM", "prefill", infos))
    (ctx,) = [ctx for name, ctx in toy.calls if name == "plan"]
    assert ctx.spans.tolist() == [2, 2, 2, 0]
    assert result.host["new_token"].shape == (3,)


def test_packed_replays_over_the_real_head_take_no_padding_row():
    engine, submodule, toy = make_engine(backend=CpuGraphBackend(strict=True))
    sizes = []
    submodule.hook = lambda walk, ids: sizes.append(ids.numel())
    infos = [request(i, [1, 2]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    toy.calls.clear()
    assert engine.exec(Batch("LLM", "prefill", infos)).bucket == BucketKey("prefill", 4, 16)
    engine.exec(Batch("LLM", "prefill", infos[:1]))
    assert [ctx.rows.size for name, ctx in toy.calls if name == "plan"] == [3, 1]
    assert sizes == [6, 2]
    assert not padding_calls(toy)


def test_replays_of_all_buckets_read_one_address():
    engine, submodule, _ = make_engine()
    pointers = set()
    submodule.hook = lambda walk, ids: pointers.add((walk, ids.data_ptr()))
    infos = [request(i, [1]) for i in range(8)]
    for info in infos:
        engine.ingest(info)
    for rows in (1, 2, 5, 8):
        engine.exec(Batch("LLM", "prefill", infos[: min(rows, 4)]))
        engine.exec(Batch("LLM", "decode", infos[:rows]))
    assert len(pointers) == 2


def test_padding_never_changes_a_real_row():
    engine, _, toy = make_engine()
    bystander, runner = request(0, [9]), request(1, [5])
    for info in (bystander, runner):
        engine.ingest(info)
    generate(engine, [bystander], 1)
    before = (int(toy.last[bystander.row]), int(toy.length[bystander.row]))
    generate(engine, [runner], 5)
    assert (int(toy.last[bystander.row]), int(toy.length[bystander.row])) == before


def test_other_input_names_than_captured_fail_the_step():
    engine, submodule, _ = make_engine()
    info = request(0, [1])
    engine.ingest(info)
    preprocess = submodule.preprocess
    submodule.preprocess = lambda *args: {**preprocess(*args), "mask": torch.ones(1)}
    error = engine.exec(Batch("LLM", "prefill", [info])).errors[0]
    assert "captured inputs ['input_ids'], this step's are ['input_ids', 'mask']" in str(error)


def test_values_that_are_not_tensors_are_constants_of_the_capture():
    engine, submodule, _ = make_engine(warm=False)
    seen = []
    preprocess, forward = submodule.preprocess, submodule.forward_batched
    scale = {"value": 1}
    submodule.preprocess = lambda *args: {**preprocess(*args), "scale": scale["value"]}

    def forward_batched(walk, engine_inputs, input_ids, scale):
        seen.append(scale)
        return forward(walk, engine_inputs, input_ids=input_ids)

    submodule.forward_batched = forward_batched
    engine.warm_up()
    scale["value"] = 2
    info = request(0, [1])
    engine.ingest(info)
    seen.clear()
    generate(engine, [info], 1)
    assert seen == [1, 1]
