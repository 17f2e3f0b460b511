from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.accelerator_graph_config import BatchedAcceleratorGraphConfig
from mstar.engine.batch import Batch
from mstar.engine.inputs import ARNodeInputs
from mstar.engine.resources.step import BucketKey

from .toy import ToyOptions, ToySubmodule, expected, generate, make_engine, request


def runner_of(engine):
    return engine._nodes["LLM"].runner


def padding_calls(toy):
    return [call for name, call in toy.calls if name == "reset"]


# Choice


def test_a_step_that_declares_another_variant_than_the_one_leased_is_refused(caplog):
    engine, submodule, _ = make_engine(ToyOptions(key_info="plain"))
    info = request(0)
    engine.ingest(info)
    submodule.step_key_info = "full"
    assert not engine.exec(Batch("LLM", "prefill", [info])).captured
    assert "cg_key_info='full', the leased bucket 'plain'" in caplog.text


@pytest.mark.parametrize(
    ("backend", "packed"),
    [(CpuGraphBackend(replays_real_head=False), (True, True)), (CpuGraphBackend(), (True, False))],
)
def test_a_context_says_whether_it_is_packed_and_padded_with_tokens(backend, packed):
    runner = runner_of(make_engine(backend=backend)[0])
    assert runner.context_flags(None) == (False, False)
    assert runner.context_flags(runner.lease_slot("decode", 3, 0)) == (False, False)
    assert runner.context_flags(runner.lease_slot("prefill", 1, 0, 3)) == packed


# Replay equals eager

EAGER, STRICT = (
    make_engine(ToyOptions(caps=False, decode_aliases=["talk"], prefill_sizes=(1, 2, 4)), backend=backend)[0]
    for backend in (EagerBackend(), None)
)


@st.composite
def edge_batches(draw):
    """Prompt lengths at, below and one above the rows and tokens of a bucket."""
    rows = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9]))
    total = draw(st.sampled_from([rows, 15, 16, 17, 63, 64, 65]).filter(lambda total: total >= rows))
    cuts = sorted(draw(st.lists(st.integers(0, total - rows), min_size=rows - 1, max_size=rows - 1)))
    lengths = [b - a + 1 for a, b in zip([0, *cuts], [*cuts, total - rows], strict=True)]
    return [draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)) for n in lengths]


@settings(max_examples=60, deadline=None)
@given(prompts=edge_batches(), walks=st.lists(st.sampled_from(["decode", "talk"]), min_size=1, max_size=4))
def test_ragged_batches_at_the_edges_of_buckets_replay_as_they_run_eager(prompts, walks):
    hosts = []
    for engine in (EAGER, STRICT):
        infos = [request(i, prompt) for i, prompt in enumerate(prompts)]
        for info in infos:
            engine.ingest(info)
        results = [engine.exec(Batch("LLM", walk, infos)) for walk in ("prefill", *walks)]
        hosts.append([result.host["new_token"].tolist() for result in results])
        toy = engine.resources["toy"]
        assert [int(toy.length[info.row]) for info in infos] == [len(prompt) + len(walks) for prompt in prompts]
        assert not toy.length[engine.capacity :].any()
        for info in infos:
            engine.remove(info.request_id)
    assert hosts[0] == hosts[1]
    assert results[0].captured == (len(prompts) <= 4 and sum(map(len, prompts)) <= 64)
    assert all(result.captured == (len(prompts) <= 8) for result in results[1:])
    assert all(result.bucket.graph_walk == "decode" for result in results[1:] if result.captured)


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
    assert submodule.forwards == 4 * 4  # 2 buckets on 2 slots: 2 warm-ups, the capture and a first replay
    assert len(plans) == 4 * 4
    assert all(ctx.capture and ctx.num_real == 0 and ctx.slot_lease.slot == ctx.slot for ctx in plans)
    assert [free for _, _, free in padding_calls(toy)] == [False, False, False, True] * 4


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


def test_a_bucket_whose_dummy_step_is_another_variant_is_dropped(caplog):
    engine, submodule, _ = make_engine(ToyOptions(key_info="plain"), warm=False)
    submodule.step_key_info = "full"
    engine.warm_up()
    assert len(runner_of(engine).dropped_buckets) == 10
    assert "cg_key_info='full', the leased bucket 'plain'" in caplog.text


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
    with pytest.raises(RuntimeError, match=r"captured 9 of 10 buckets, dropped LLM: decode\[bs=4"):
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


def test_a_resource_whose_plans_no_graph_can_follow_makes_its_node_run_eager(caplog):
    engine, _, toy = make_engine(warm=False)
    toy.not_captured_because = "it moves its tables"
    engine.warm_up()
    assert caplog.text.count("LLM: no step is captured: {'toy': 'it moves its tables'}") == 1
    assert len(runner_of(engine).dropped_buckets) == 10
    info = request(0, [1])
    engine.ingest(info)
    assert generate(engine, [info], 2) == {0: expected([1], 2)}
    assert engine.eager_steps == {("LLM", "prefill", "resource"): 1, ("LLM", "decode", "resource"): 2}


# Compilation


@pytest.mark.parametrize(
    ("environment", "config", "mode"),
    [
        (None, None, "max-autotune-no-cudagraphs"),
        (None, "default", "default"),
        ("max-autotune", "default", "max-autotune"),
        ("default", None, "default"),
    ],
)
def test_the_mode_is_the_environment_s_then_the_configuration_s_then_the_default(
    monkeypatch, environment, config, mode
):
    monkeypatch.setenv("MSTAR_GRAPH_COMPILE_MODE", environment or "")
    calls = []

    class Compiling(CpuGraphBackend):
        def compile(self, forward, mode):
            calls.append((forward.__name__, mode))
            return forward

    talk = BatchedAcceleratorGraphConfig("talk", ARNodeInputs(), capture_batch_sizes=[1, 2], compile_mode=config)
    plain = BatchedAcceleratorGraphConfig("plain", ARNodeInputs(), capture_batch_sizes=[1], compile=False)
    options = ToyOptions(decode_sizes=(1,), prefill_sizes=(1,), prefill_tokens=(16,), extra_configs=[talk, plain])
    make_engine(options, backend=Compiling(compiles=True))
    assert sorted(calls) == sorted(
        ("forward_batched", m) for m in (mode, *[environment or "max-autotune-no-cudagraphs"] * 2)
    )


@pytest.mark.parametrize("own_graphs", ["reduce-overhead", "max-autotune"])
def test_a_mode_with_graphs_of_its_own_is_warned_of_when_the_runner_is_built(monkeypatch, caplog, own_graphs):
    monkeypatch.setenv("MSTAR_GRAPH_COMPILE_MODE", own_graphs)
    make_engine(backend=CpuGraphBackend(compiles=True), warm=False)
    assert caplog.text.count(f"compile mode '{own_graphs}' captures graphs of its own") == 2
    caplog.clear()
    make_engine(backend=CpuGraphBackend(), warm=False)
    assert not caplog.text


def test_what_may_not_be_compiled_is_not():
    submodule = ToySubmodule()
    submodule.disable_torch_compile = True

    class Compiling(CpuGraphBackend):
        def compile(self, forward, mode):
            pytest.fail("compiled")

    make_engine(submodule=submodule, backend=Compiling(compiles=True))


def test_a_capture_that_would_compile_anew_drops_its_bucket(caplog):
    engine, submodule, _ = make_engine(warm=False)
    compiled = torch.compile(lambda x, n: x + n, backend="eager", dynamic=False)
    calls = iter(range(10_000))
    submodule.hook = lambda walk, ids: compiled(ids, next(calls)) if walk == "decode" and ids.numel() == 4 else None
    engine.warm_up()
    assert runner_of(engine).dropped_buckets == [BucketKey("decode", 4, 4)]
    assert "recompile" in caplog.text


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


class KeepsItsInput(ToySubmodule):
    """Decode's tokens lie in a buffer of the slot, as a resource would keep them."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(2, 16, dtype=torch.int64)

    def preprocess(self, graph_walk, engine_inputs, inputs):
        tensors = super().preprocess(graph_walk, engine_inputs, inputs)
        if graph_walk == "decode":
            ids = tensors["input_ids"]
            tensors["input_ids"] = self.kept[engine_inputs.ctx.slot, : ids.numel()].copy_(ids)
        return tensors

    def static_inputs(self, graph_walk):
        return frozenset({"input_ids"}) if graph_walk == "decode" else frozenset()


def test_a_static_input_is_captured_where_it_lies():
    engine, submodule, _ = make_engine(submodule=KeepsItsInput())
    read = set()
    submodule.hook = lambda walk, ids: read.add((walk, ids.data_ptr()))
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    assert generate(engine, infos, 4) == {i: expected([i + 1], 4) for i in range(3)}
    assert {at for walk, at in read if walk == "decode"} == {row.data_ptr() for row in submodule.kept}
    assert not engine.eager_steps


def test_a_static_input_that_has_moved_fails_the_step(caplog):
    engine, submodule, _ = make_engine(submodule=KeepsItsInput())
    info = request(0, [1])
    engine.ingest(info)
    submodule.kept = submodule.kept.clone()
    engine.exec(Batch("LLM", "prefill", [info]))
    assert not engine.exec(Batch("LLM", "decode", [info])).captured
    assert "static input 'input_ids' has moved since the capture" in caplog.text


def test_padding_never_changes_a_real_row():
    engine, _, toy = make_engine()
    bystander, runner = request(0, [9]), request(1, [5])
    for info in (bystander, runner):
        engine.ingest(info)
    generate(engine, [bystander], 1)
    before = (int(toy.last[bystander.row]), int(toy.length[bystander.row]))
    generate(engine, [runner], 5)
    assert (int(toy.last[bystander.row]), int(toy.length[bystander.row])) == before


def test_other_input_names_than_captured_fail_the_step(caplog):
    engine, submodule, _ = make_engine()
    info = request(0, [1])
    engine.ingest(info)
    preprocess = submodule.preprocess
    submodule.preprocess = lambda *args: {**preprocess(*args), "mask": torch.ones(1)}
    assert not engine.exec(Batch("LLM", "prefill", [info])).captured
    assert "captured inputs ['input_ids'], this step's are ['input_ids', 'mask']" in caplog.text


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
