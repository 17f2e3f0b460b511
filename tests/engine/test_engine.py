from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.batch import Batch
from mstar.engine.engine import Engine
from mstar.engine.resources.step import AllocationFailed, BucketKey
from mstar.utils.errors import Unavailable

from .toy import ToyOptions, ToyReqConfig, ToySpec, ToySubmodule, expected, generate, make_engine, request

BACKENDS = {
    "eager": lambda: EagerBackend(),
    "service": lambda: CpuGraphBackend(),
    "service-strict": lambda: CpuGraphBackend(strict=True),
    "captured-at-load": lambda: CpuGraphBackend(
        warmup_forwards=2, capture_at_load=True, replays_real_head=False, strict=True
    ),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9])
def test_tokens_are_the_same_on_every_path(name, rows):
    engine, _, _ = make_engine(ToyOptions(caps=False), backend=BACKENDS[name]())
    infos = [request(i, [5 * i + 1] * (i + 1)) for i in range(rows)]
    for info in infos:
        engine.ingest(info)
    assert generate(engine, infos, 4) == {i: expected([5 * i + 1] * (i + 1), 4) for i in range(rows)}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=8))
def test_a_random_ragged_batch_replays_as_it_runs_eager(prompts):
    results = []
    for make in (BACKENDS["eager"], BACKENDS["captured-at-load"], BACKENDS["service-strict"]):
        engine, _, toy = make_engine(ToyOptions(caps=False), backend=make())
        infos = [request(i, prompt) for i, prompt in enumerate(prompts)]
        for info in infos:
            engine.ingest(info)
        results.append(generate(engine, infos, 2))
        assert [int(toy.length[info.row]) for info in infos] == [len(prompt) + 2 for prompt in prompts]
    assert results[0] == results[1] == results[2]


def test_master_rows_go_out_highest_first_and_row_0_last():
    engine, _, toy = make_engine(capacity=3)
    infos = [request(i) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    assert [info.row for info in infos] == [2, 1, 0]
    engine.remove(1)
    again = request(7)
    engine.ingest(again)
    assert again.row == 1
    assert {i: r for i, r in toy.requests.items() if i >= 0} == {0: 2, 2: 0, 7: 1}


def test_a_full_engine_refuses_and_keeps_its_rows():
    engine, _, _ = make_engine(capacity=1)
    engine.ingest(request(0))
    with pytest.raises(Unavailable, match="all 1 rows"):
        engine.ingest(request(1))
    engine.remove(0)
    engine.ingest(request(1))


def test_a_refused_ingest_leaves_nothing_behind():
    engine, submodule, toy = make_engine(capacity=2)
    info = request(3)
    info.resource_configs = {"toy": ToyReqConfig(refuse=True)}
    with pytest.raises(ValueError, match="refused by the toy"):
        engine.ingest(info)
    assert 3 not in toy.requests
    assert info.row == -1
    assert submodule.cleaned == [3]
    first, second = request(4), request(5)
    engine.ingest(first)
    engine.ingest(second)
    assert (first.row, second.row) == (1, 0)


def test_ingest_and_remove_are_idempotent():
    engine, submodule, _ = make_engine()
    info = request(1)
    engine.ingest(info)
    row = info.row
    engine.ingest(info)
    assert info.row == row
    engine.remove(1)
    engine.remove(1)
    engine.remove(99)
    assert submodule.cleaned == [1]


def test_negative_ids_belong_to_padding():
    engine, _, _ = make_engine()
    with pytest.raises(ValueError, match="request_id must be >= 0"):
        engine.ingest(request(-2))


def test_a_row_whose_inputs_fail_fails_alone():
    engine, _, toy = make_engine()
    infos = [request(0, [1]), request(1, [2], fail=True), request(2, [3], skip=True), request(3, [4])]
    for info in infos:
        engine.ingest(info)
    result = engine.exec(Batch("LLM", "prefill", infos))
    assert result.request_ids == (0, 3)
    assert list(result.host["new_token"]) == [8, 29]
    assert set(result.errors) == {1}
    assert "bad row" in str(result.errors[1])
    assert [int(toy.length[info.row]) for info in infos] == [1, 0, 0, 1]


def test_a_batch_without_a_row_left_runs_nothing():
    engine, submodule, _ = make_engine()
    info = request(0, fail=True)
    engine.ingest(info)
    ran = submodule.forwards
    result = engine.exec(Batch("LLM", "prefill", [info]))
    assert result.request_ids == ()
    assert set(result.errors) == {0}
    assert submodule.forwards == ran


def explode(walk, ids):
    raise RuntimeError("broke in forward")


def spoil(submodule, toy, where):
    """Makes one stage of every step raise "broke in ..." until :func:`mend`."""
    if where == "forward":
        submodule.hook = explode
    elif where in ("declare_step", "preprocess", "cg_key_info"):

        def broken(*args, **kwargs):
            raise RuntimeError(f"broke in {where}")

        setattr(submodule, where, broken)
    else:
        hooks = ["plan", "pre_plan", "promote"] if where == "plan" else [where]
        toy.fail = dict.fromkeys(hooks, RuntimeError(f"broke in {where}"))


def mend(submodule, toy, where):
    submodule.hook = None
    toy.fail.clear()
    submodule.__dict__.pop(where, None)


STAGES = ["cg_key_info", "declare_step", "admit", "plan", "preprocess", "forward"]


@pytest.mark.parametrize("preplans", ["inline", "threaded", None])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("where", STAGES)
def test_a_stage_that_raises_fails_its_rows_commits_nothing_and_the_engine_goes_on(where, name, preplans, monkeypatch):
    monkeypatch.setenv("MSTAR_PRE_PLAN_SPEC", str(int(preplans == "threaded")))
    engine, submodule, toy = make_engine(backend=BACKENDS[name](), preplans=preplans is not None)
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    batch = Batch("LLM", "prefill", infos)
    spoil(submodule, toy, where)
    if preplans:
        engine.pre_plan(batch)
    in_flight = engine.launch(batch)
    assert set(in_flight.errors) == {0, 1, 2}  # known before anything is collected
    assert all(f"broke in {where}" in str(error) for error in in_flight.errors.values())
    assert engine.collect(in_flight).request_ids == ()
    assert not toy.length.any()
    assert "commit" not in toy.hooks()
    mend(submodule, toy, where)
    assert generate(engine, infos, 2) == {i: expected([i + 1], 2) for i in range(3)}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("walk", ["prefill", "decode"])
def test_a_row_that_breaks_a_forward_fails_alone(name, walk):
    engine, submodule, toy = make_engine(backend=BACKENDS[name]())
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    if walk == "decode":
        engine.exec(Batch("LLM", "prefill", infos))
    bad = {"prefill": 2, "decode": expected([2], 0)[0]}[walk]

    def poisoned(_, ids):
        is_captured = toy.calls[-1][1].slot_lease is not None  # where reading the ids is forbidden
        if is_captured or (ids == bad).any():
            raise RuntimeError("poison")

    submodule.hook = poisoned
    result = engine.exec(Batch("LLM", walk, infos))
    assert set(result.errors) == {1}
    assert result.request_ids == (0, 2)
    steps = 0 if walk == "prefill" else 1
    assert result.host["new_token"].tolist() == [expected([1], steps)[-1], expected([3], steps)[-1]]
    assert [int(toy.length[info.row]) for info in infos] == [steps + 1, steps, steps + 1]
    assert engine.counters["retried_steps"] == 1
    assert engine.eager_steps["LLM", walk, "retry"] == 1
    submodule.hook = None
    engine.remove(1)
    decode = engine.exec(Batch("LLM", "decode", [infos[0], infos[2]]))
    assert decode.host["new_token"].tolist() == [expected([1], steps + 1)[-1], expected([3], steps + 1)[-1]]


def test_a_commit_that_raises_fails_its_rows_which_never_run_again():
    engine, submodule, toy = make_engine()
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    ran = submodule.forwards
    toy.fail["commit"] = RuntimeError("broke in commit")
    result = engine.exec(Batch("LLM", "prefill", infos))
    assert set(result.errors) == {0, 1, 2}
    assert str(result.errors[0]) == "broke in commit"
    assert submodule.forwards - ran <= 1
    assert engine.counters["retried_steps"] == 0
    toy.fail.clear()
    for info in infos:
        engine.remove(info.request_id)
    again = request(5, [1])
    engine.ingest(again)
    assert generate(engine, [again], 2) == {5: expected([1], 2)}


def test_padding_rows_are_released_however_a_step_ends():
    engine, submodule, toy = make_engine()
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    engine.exec(Batch("LLM", "prefill", infos))
    for where in ("admit", "plan", "forward", "commit"):
        toy.hooks()
        spoil(submodule, toy, where)
        engine.exec(Batch("LLM", "decode", infos))
        mend(submodule, toy, where)
        assert toy.hooks().count("reset") == 1, where
    toy.budget = 0
    engine.exec(Batch("LLM", "decode", infos))
    assert toy.hooks() == ["admit", "reset"]


@pytest.mark.parametrize("name", BACKENDS)
def test_two_steps_may_be_launched_before_the_first_is_collected(name):
    engine, _, _ = make_engine(backend=BACKENDS[name]())
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    decode = Batch("LLM", "decode", infos)
    waiting, rows = [engine.launch(Batch("LLM", "prefill", infos))], []
    for _ in range(4):
        waiting.append(engine.launch(decode))
        rows.append(engine.collect(waiting.pop(0)).host["new_token"].tolist())
    last = engine.collect(waiting[0])
    assert engine.collect(waiting[0]) is last
    rows.append(last.host["new_token"].tolist())
    assert list(map(list, zip(*rows, strict=True))) == [expected([i + 1], 4) for i in range(3)]


class Slow(CpuGraphBackend):
    """Logs when a step's values are waited for, which may fail."""

    def __init__(self):
        super().__init__()
        self.log, self.error = [], None

    def copy_to_host(self, tensors):
        number, copy = len([entry for entry in self.log if entry[0] == "launched"]), super().copy_to_host(tensors)
        self.log.append(("launched", number))
        return SimpleNamespace(wait=lambda: self._wait(number, copy))

    def _wait(self, number, copy):
        self.log.append(("waited", number))
        if self.error is not None:
            raise self.error
        return copy.wait()


def test_a_slot_that_recurs_is_waited_for_before_its_buffers_are_written():
    backend = Slow()
    engine, _, toy = make_engine(backend=backend)
    info = request(0, [1])
    engine.ingest(info)
    plan = toy.plan
    toy.plan = lambda step, ctx: (backend.log.append(("planned", ctx.slot)), plan(step, ctx))
    flights = [engine.launch(Batch("LLM", "prefill", [info]))]
    flights += [engine.launch(Batch("LLM", "decode", [info])) for _ in range(2)]
    order = [entry for entry in backend.log if entry[0] != "launched"]
    assert order == [("planned", 0), ("planned", 1), ("waited", 0), ("planned", 0)]
    tokens = [int(engine.collect(flight).host["new_token"][0]) for flight in flights]
    assert tokens == expected([1], 2)
    assert [number for event, number in backend.log if event == "waited"] == [0, 1, 2]  # each once


def test_a_device_error_that_shows_at_the_wait_fails_the_rows_of_its_step():
    backend = Slow()
    engine, _, _ = make_engine(backend=backend)
    infos = [request(i, [1]) for i in range(2)]
    for info in infos:
        engine.ingest(info)
    flight = engine.launch(Batch("LLM", "prefill", infos))
    backend.error = RuntimeError("device lost")
    result = engine.collect(flight)
    assert result.request_ids == ()
    assert {str(error) for error in result.errors.values()} == {"device lost"}
    assert set(result.errors) == {0, 1}
    backend.error = None
    assert not engine.exec(Batch("LLM", "prefill", infos)).errors


class Alone(ToySubmodule):
    """Takes one row at a time."""

    def can_batch(self, graph_walk, inputs):
        return False

    def forward(self, graph_walk, engine_inputs, **tensors):
        assert len(engine_inputs.request_ids) == 1
        self.alone = getattr(self, "alone", 0) + 1
        return self.forward_batched(graph_walk, engine_inputs, **tensors)


def test_rows_that_cannot_be_batched_run_one_by_one_each_on_a_slot_of_its_own():
    engine, submodule, toy = make_engine(backend=EagerBackend(), submodule=Alone())
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    toy.calls.clear()
    assert generate(engine, infos, 1) == {i: expected([i + 1], 1) for i in range(3)}
    assert submodule.alone == 6
    contexts = [ctx for name, ctx in toy.calls if name == "plan"]
    assert [ctx.slot for ctx in contexts] == [0, 1, 0, 1, 0, 1]
    names = [name for name, _ in toy.calls]
    assert names[:6] == ["admit"] * 3 + ["plan", "commit", "plan"]


def test_a_refused_row_stops_the_others_before_any_forward():
    engine, submodule, toy = make_engine(backend=EagerBackend(), submodule=Alone(), budget=2)
    infos = [request(0, [1]), request(1, [1, 2, 3])]
    for info in infos:
        engine.ingest(info)
    result = engine.exec(Batch("LLM", "prefill", infos))
    assert result.failed_resource == "toy"
    assert submodule.forwards == 0
    assert result.request_ids == ()
    assert toy.hooks() == ["admit", "admit", "abandon"]


def test_rows_that_can_be_captured_together_are_not_run_one_by_one():
    engine, submodule, _ = make_engine(backend=CpuGraphBackend(), submodule=Alone())
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    result = engine.exec(Batch("LLM", "prefill", infos))
    assert result.captured
    assert not hasattr(submodule, "alone")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_mixed_step_gives_every_row_what_its_own_walk_would(name):
    engine, submodule, _ = make_engine(backend=BACKENDS[name]())
    assert engine.combined_graph_walks() == {"LLM": {"mixed": ("decode", "prefill")}}
    old, new = [request(i, [i + 1]) for i in range(2)], [request(2, [7, 8, 9]), request(3, [4])]
    for info in (*old, *new):
        engine.ingest(info)
    engine.exec(Batch("LLM", "prefill", old))
    prepared = submodule.prepared
    walks = ["decode", "decode", "prefill", "prefill"]
    result = engine.exec(Batch("LLM", "mixed", [*old, *new], row_walks=walks))
    assert not result.errors
    tokens = [expected([1], 1)[1], expected([2], 1)[1], *expected([7, 8, 9], 0), *expected([4], 0)]
    assert result.host["new_token"].tolist() == tokens
    assert submodule.prepared == prepared + 2  # decode rows share one object
    if name != "eager":
        assert result.bucket == BucketKey("prefill", 4, 16)
    follow = engine.exec(Batch("LLM", "decode", [*old, *new]))
    assert follow.host["new_token"].tolist() == [expected([token], 0)[0] for token in tokens]


def test_a_resource_with_room_for_fewer_requests_bounds_the_engine():
    engine = Engine(
        {"LLM": ToySubmodule()},
        [ToySpec("toy", {"LLM"}, requests=2)],
        device="cpu",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        capacity=5,
    )
    assert engine.capacity == 2
    engine.ingest(request(0))
    engine.ingest(request(1))
    with pytest.raises(Unavailable, match="all 2 rows"):
        engine.ingest(request(2))


def test_a_refused_admission_runs_nothing_and_names_the_resource():
    engine, submodule, _ = make_engine(budget=5)
    small, large = request(0, [1, 2]), request(1, [1, 2, 3, 4])
    engine.ingest(small)
    engine.ingest(large)
    assert engine.exec(Batch("LLM", "prefill", [small])).request_ids == (0,)
    ran = submodule.forwards
    result = engine.exec(Batch("LLM", "prefill", [large]))
    assert result.refused is not None
    assert isinstance(result.refused.reason, AllocationFailed)
    assert result.failed_resource == "toy"
    assert result.request_ids == ()
    assert not result.errors
    assert submodule.forwards == ran
    engine.remove(0)
    assert engine.exec(Batch("LLM", "prefill", [large])).request_ids == (1,)


def test_an_unchanged_decode_batch_is_declared_once_per_slot_and_prepares_no_row():
    engine, submodule, _ = make_engine(backend=CpuGraphBackend())
    infos = [request(i) for i in range(4)]
    for info in infos:
        engine.ingest(info)
    engine.exec(Batch("LLM", "prefill", infos))
    declared, prepared = submodule.declared, submodule.prepared
    batch = Batch("LLM", "decode", infos)
    for _ in range(6):
        engine.exec(batch)
    engine.exec(Batch("LLM", "decode", list(infos)))
    assert submodule.declared == declared + 2
    assert submodule.prepared == prepared
    engine.exec(Batch("LLM", "decode", infos[:3]))
    assert submodule.declared == declared + 3


def test_a_reused_row_is_never_served_from_an_old_preparation():
    engine, _, _ = make_engine()
    first = request(0, [1])
    engine.ingest(first)
    generate(engine, [first], 2)
    batch = Batch("LLM", "decode", [first])
    engine.exec(batch)
    engine.remove(0)
    with pytest.raises(KeyError, match="request 0 was not ingested"):
        engine.exec(batch)


def test_host_values_stay_when_the_next_step_overwrites_the_buffers():
    engine, _, _ = make_engine()
    info = request(0, [1])
    engine.ingest(info)
    kept = engine.exec(Batch("LLM", "prefill", [info])).host["new_token"]
    for _ in range(4):
        engine.exec(Batch("LLM", "decode", [info]))
    assert kept.tolist() == expected([1], 0)


def test_steps_and_eager_steps_are_counted_with_their_reason():
    engine, submodule, _ = make_engine(ToyOptions(decode_sizes=(2,), caps=False))
    infos = [request(i, [1] * 20) for i in range(4)]
    for info in infos:
        engine.ingest(info)
    assert not engine.exec(Batch("LLM", "prefill", infos)).captured
    result = engine.exec(Batch("LLM", "decode", infos[:1]))
    assert result.captured
    assert str(result.bucket) == "decode[bs=2,tokens=2,key=None]"
    engine.exec(Batch("LLM", "decode", infos))
    submodule.key_info = "guided"
    engine.exec(Batch("LLM", "decode", infos[:2]))
    submodule.key_info = None
    engine.exec(Batch("LLM", "other", infos[:2]))
    assert engine.steps == {("LLM", "prefill"): 1, ("LLM", "decode"): 3, ("LLM", "other"): 1}
    assert engine.eager_steps == {
        ("LLM", "prefill", "tokens"): 1,
        ("LLM", "decode", "batch_size"): 1,
        ("LLM", "decode", "key_info"): 1,
        ("LLM", "other", "no_capture"): 1,
    }


def test_the_cap_is_the_smaller_of_submodule_and_captures():
    engine, submodule, _ = make_engine(ToyOptions(decode_sizes=(1, 8)))
    assert engine.max_batch_size("LLM", "decode") == 8
    assert engine.max_batch_size("LLM", "unknown") is None
    assert engine.packed_sizes("LLM", "prefill")[-1] == 64
    assert engine.packed_sizes("LLM", "decode") == ()
    submodule.max_batch_size = lambda walk: 3
    assert engine.max_batch_size("LLM", "decode") == 3


def test_a_spec_for_an_unknown_node_is_refused_at_load():
    with pytest.raises(ValueError, match="'toy' names node 'vision'"):
        Engine(
            {"LLM": ToySubmodule()},
            [ToySpec("toy", {"vision"})],
            device="cpu",
            dtype=None,
            kv_dtype=None,
            capacity=1,
        )


def test_an_unknown_node_is_a_key_error():
    engine, _, _ = make_engine()
    with pytest.raises(KeyError):
        engine.exec(Batch("vision", "prefill", []))


def test_a_batch_that_ran_before_the_warm_up_is_captured_after_it():
    engine, _, _ = make_engine(warm=False)
    info = request(0, [1])
    engine.ingest(info)
    decode = Batch("LLM", "decode", [info])
    assert not engine.exec(Batch("LLM", "prefill", [info])).captured
    first = engine.exec(decode)
    assert engine.eager_steps["LLM", "decode", "not_warmed_up"] == 1
    engine.warm_up()
    second, third = engine.exec(decode), engine.exec(decode)
    assert (first.captured, second.captured, third.captured) == (False, True, True)
    assert [int(step.host["new_token"][0]) for step in (first, second, third)] == expected([1], 3)[1:]
