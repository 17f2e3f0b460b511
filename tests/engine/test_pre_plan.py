"""A step may be planned ahead; it is used by the launch of that very step, and undone before anything else happens."""

import threading

import numpy as np
import pytest
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.batch import Batch
from mstar.engine.engine import Engine
from mstar.engine.resources.step import SubmoduleStep

from .toy import ToyOptions, ToyReqConfig, ToySpec, ToySubmodule, expected, make_engine, request


@pytest.fixture(params=["inline", "threaded"])
def threaded(request, monkeypatch):
    monkeypatch.setenv("MSTAR_PRE_PLAN_SPEC", str(int(request.param == "threaded")))
    return request.param == "threaded"


NOTHING = np.empty(0, np.int64)


def serving(rows=3, **kwargs):
    """An engine whose rows were prefilled, its parts, and the rows' decode batch."""
    engine, submodule, toy = make_engine(preplans=True, **kwargs)
    infos = [request(i, [i + 1]) for i in range(rows)]
    for info in infos:
        engine.ingest(info)
    assert not engine.exec(Batch("LLM", "prefill", infos)).errors
    toy.hooks()
    return engine, submodule, toy, Batch("LLM", "decode", infos), infos


@pytest.mark.parametrize("rows", [3, 4])
def test_a_step_planned_ahead_is_neither_admitted_nor_planned_again(threaded, rows):
    engine, _, toy, decode, infos = serving(rows)
    tokens = {info.request_id: expected([info.request_id + 1], 0) for info in infos}
    for _ in range(5):
        engine.pre_plan(decode)
        result = engine.exec(decode)
        assert not result.errors
        for request_id, token in zip(result.request_ids, result.host["new_token"].tolist(), strict=True):
            tokens[request_id].append(token)
        hooks = [name for name in toy.hooks() if name != "reset"]
        assert hooks == ["admit", "pre_plan", "promote", "commit"]
    assert tokens == {i: expected([i + 1], 5) for i in range(rows)}
    assert engine.counters["staged"] == engine.counters["promoted"] == 5
    assert engine.counters["cleared"] == 0


def test_the_thread_plans_while_the_caller_goes_on(monkeypatch):
    monkeypatch.setenv("MSTAR_PRE_PLAN_SPEC", "1")
    engine, _, toy, decode, _ = serving()
    entered, may_go_on, planned_on = threading.Event(), threading.Event(), []
    plan = toy.plan

    def slow_plan(step, ctx):
        planned_on.append(threading.current_thread())
        entered.set()
        assert may_go_on.wait(10)
        assert torch.is_inference_mode_enabled()
        plan(step, ctx)

    toy.plan = slow_plan
    engine.pre_plan(decode)
    assert entered.wait(10)
    assert not may_go_on.is_set()  # pre_plan has returned, the plan has not
    threading.Timer(0.05, may_go_on.set).start()
    assert not engine.exec(decode).errors
    assert engine.counters["promoted"] == 1
    assert len(planned_on) == 1
    assert planned_on[0] is not threading.current_thread()


@pytest.mark.parametrize("rows", [[0, 1], [1, 0, 2], [0, 1, 2, 3]])
def test_a_launch_of_other_rows_undoes_the_plan_and_plans_inline(threaded, rows):
    engine, _, toy, _, infos = serving(4)
    engine.pre_plan(Batch("LLM", "decode", infos[:3]))
    result = engine.exec(Batch("LLM", "decode", [infos[i] for i in rows]))
    assert result.host["new_token"].tolist() == [expected([i + 1], 1)[1] for i in rows]
    assert [name for name in toy.hooks() if name != "reset"] == [
        "admit",
        "pre_plan",
        "clear",
        "admit",
        "plan",
        "commit",
    ]
    assert (engine.counters["promoted"], engine.counters["cleared"]) == (0, 1)


def test_a_prefill_in_between_undoes_the_plan(threaded):
    engine, _, _, decode, _ = serving(3)
    newcomer = request(9, [5, 5])
    engine.ingest(newcomer)
    engine.pre_plan(decode)
    assert engine.exec(Batch("LLM", "prefill", [newcomer])).host["new_token"].tolist() == expected([5, 5], 0)
    assert engine.exec(decode).host["new_token"].tolist() == [expected([i + 1], 1)[1] for i in range(3)]
    assert (engine.counters["promoted"], engine.counters["cleared"]) == (0, 1)


def test_a_prompt_that_was_planned_ahead_is_prepared_once(threaded):
    engine, submodule, _ = make_engine(preplans=True)
    info = request(0, [4, 5])
    engine.ingest(info)
    batch = Batch("LLM", "prefill", [info])
    engine.pre_plan(batch)
    assert engine.exec(batch).host["new_token"].tolist() == expected([4, 5], 0)
    assert submodule.prepared == 1
    assert engine.counters["promoted"] == 1


def test_removing_a_request_of_the_plan_undoes_it_and_removing_another_does_not(threaded):
    engine, _, toy, _, infos = serving(4)
    engine.pre_plan(Batch("LLM", "decode", infos[:3]))
    engine.remove(infos[3].request_id)
    assert engine.counters["cleared"] == 0
    engine.remove(infos[0].request_id)
    assert engine.counters["cleared"] == 1
    result = engine.exec(Batch("LLM", "decode", infos[1:3]))
    assert result.host["new_token"].tolist() == [expected([i + 1], 1)[1] for i in (1, 2)]
    assert "promote" not in toy.hooks()


def test_planning_ahead_again_undoes_the_former_plan(threaded):
    engine, _, _, decode, infos = serving(3)
    engine.pre_plan(Batch("LLM", "decode", infos[:1]))
    engine.pre_plan(decode)
    assert not engine.exec(decode).errors
    assert engine.counters["cleared"] == engine.counters["promoted"] == 1


@pytest.mark.parametrize("hook", ["admit", "pre_plan"])
def test_a_plan_that_fails_is_not_staged_and_the_launch_plans_inline(threaded, hook):
    engine, _, toy, decode, _ = serving()
    toy.fail[hook] = RuntimeError("no plan today")
    engine.pre_plan(decode)
    engine.extend_prefix_chains(NOTHING, NOTHING)  # any call waits for the plan
    toy.fail.clear()
    assert "clear" in toy.hooks()
    assert engine.exec(decode).host["new_token"].tolist() == [expected([i + 1], 1)[1] for i in range(3)]
    assert engine.counters["staged"] == 0


def test_a_refusal_ahead_is_met_and_reported_by_the_launch(threaded):
    engine, _, toy, decode, _ = serving(budget=5)
    engine.pre_plan(decode)
    assert engine.exec(decode).failed_resource == "toy"
    assert engine.counters["staged"] == 0
    toy.budget = 100
    assert not engine.exec(decode).errors


def test_a_promotion_that_fails_is_undone_and_the_rows_run_alone(threaded):
    engine, _, toy, decode, _ = serving()
    engine.pre_plan(decode)
    toy.fail["promote"] = RuntimeError("stale")
    result = engine.exec(decode)
    assert result.host["new_token"].tolist() == [expected([i + 1], 1)[1] for i in range(3)]
    hooks = [name for name in toy.hooks() if name != "reset"]
    assert hooks[:5] == ["admit", "pre_plan", "promote", "abandon", "clear"]
    assert engine.counters["retried_steps"] == 1


@pytest.mark.parametrize(
    ("options", "backend"), [(ToyOptions(decode_sizes=(1,), caps=False), None), (None, EagerBackend())]
)
def test_an_eager_step_is_not_planned_ahead(threaded, options, backend):
    engine, _, toy, decode, _ = serving(options=options, backend=backend)
    engine.pre_plan(decode)
    assert not engine.exec(decode).errors
    assert [name for name in toy.hooks() if name != "reset"] == ["admit", "plan", "commit"]


class Both(ToySubmodule):
    """Steps through two resources, of which the toy plans ahead."""

    def declare_step(self, *args, **kwargs):
        step = super().declare_step(*args, **kwargs)
        return SubmoduleStep({**step.steps, "other": step.steps["toy"]}, step.segments)


def serving_both():
    engine = Engine(
        {"LLM": Both()},
        [ToySpec("toy", {"LLM"}, preplans=True), ToySpec("other", {"LLM"})],
        device="cpu",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        capacity=4,
        backend=CpuGraphBackend(),
    )
    engine.warm_up()
    info = request(0, [3])
    engine.ingest(info)
    assert not engine.exec(Batch("LLM", "prefill", [info])).errors
    toy, other = engine.resources["toy"], engine.resources["other"]
    toy.hooks()
    other.hooks()
    return engine, toy, other, Batch("LLM", "decode", [info])


def test_only_resources_that_can_are_planned_ahead(threaded):
    engine, toy, other, decode = serving_both()
    engine.pre_plan(decode)
    assert engine.exec(decode).host["new_token"].tolist() == expected([3], 1)[1:]
    assert toy.hooks() == ["admit", "pre_plan", "promote", "commit"]
    assert other.hooks() == ["admit", "plan", "commit"]


def test_a_resource_that_plans_inline_may_still_refuse_the_step(threaded):
    engine, toy, other, decode = serving_both()
    engine.pre_plan(decode)
    other.budget = 0
    assert engine.exec(decode).failed_resource == "other"
    assert toy.hooks() == ["admit", "pre_plan", "clear"]
    other.budget = 100
    assert engine.exec(decode).host["new_token"].tolist() == expected([3], 1)[1:]


def test_planning_ahead_for_a_stranger_is_a_key_error(threaded):
    engine, _, _, _, infos = serving()
    with pytest.raises(KeyError, match="request 7 was not ingested"):
        engine.pre_plan(Batch("LLM", "decode", [request(7)]))
    with pytest.raises(KeyError):
        engine.pre_plan(Batch("vision", "decode", infos))


def test_a_refused_ingest_leaves_a_staged_plan_alone(threaded):
    engine, _, _, decode, _ = serving()
    engine.pre_plan(decode)
    bad = request(8)
    bad.resource_configs = {"toy": ToyReqConfig(refuse=True)}
    with pytest.raises(ValueError, match="refused by the toy"):
        engine.ingest(bad)
    assert not engine.exec(decode).errors
    assert engine.counters["promoted"] == 1


def test_rows_that_run_one_by_one_undo_the_plan_of_others_first(threaded):
    class Alone(ToySubmodule):
        def can_batch(self, graph_walk, inputs):
            return graph_walk != "alone"

    engine, _, toy, decode, _ = serving(3, submodule=Alone())
    newcomers = [request(i, [i]) for i in (8, 9)]
    for info in newcomers:
        engine.ingest(info)
    engine.pre_plan(decode)
    assert not engine.exec(Batch("LLM", "alone", newcomers)).errors
    hooks = [name for name in toy.hooks() if name != "reset"]
    assert hooks[:4] == ["admit", "pre_plan", "clear", "admit"]
    assert engine.exec(decode).host["new_token"].tolist() == [expected([i + 1], 1)[1] for i in range(3)]
    assert (engine.counters["promoted"], engine.counters["cleared"]) == (0, 1)


def test_the_same_rows_with_other_lengths_are_another_step(threaded):
    engine, _, _ = make_engine(preplans=True)
    info = request(0, [4, 5])
    engine.ingest(info)
    engine.pre_plan(Batch("LLM", "prefill", [info]))
    info.prompt_ids = np.array([4, 5, 6])  # such as the next chunk of a prompt, which falls into the same bucket
    assert engine.exec(Batch("LLM", "prefill", [info])).host["new_token"].tolist() == expected([4, 5, 6], 0)
    assert (engine.counters["promoted"], engine.counters["cleared"]) == (0, 1)


def test_a_plan_ahead_waits_until_the_device_is_past_the_last_step_of_its_slot(threaded):
    events = []

    class Logging(CpuGraphBackend):
        def copy_to_host(self, tensors):
            copy, number = super().copy_to_host(tensors), len(events)
            events.append("launched")
            wait = copy.wait
            copy.wait = lambda: events.append(f"waited for {number}") or wait()
            return copy

    engine, _, toy = make_engine(preplans=True, backend=Logging())
    info = request(0, [1])
    engine.ingest(info)
    plan = toy.plan
    toy.plan = lambda step, ctx: events.append(f"planned on {ctx.slot}") or plan(step, ctx)
    decode = Batch("LLM", "decode", [info])
    flights = [engine.launch(Batch("LLM", "prefill", [info])), engine.launch(decode)]
    events.clear()
    engine.pre_plan(decode)
    assert engine.collect(flights[1]).host["new_token"].tolist() == expected([1], 1)[1:]
    assert events[:2] == ["waited for 1", "planned on 0"]  # the prefill's copy was the event after its plan
    assert engine.exec(decode).host["new_token"].tolist() == expected([1], 2)[2:]
