from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.batch import Batch
from mstar.engine.resources.step import AllocationFailed
from mstar.utils.errors import Unavailable

from .toy import ToyOptions, ToyReqConfig, expected, generate, make_engine, request

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


@pytest.mark.parametrize("name", BACKENDS)
def test_a_failing_forward_fails_its_rows_commits_nothing_and_the_engine_goes_on(name):
    engine, submodule, toy = make_engine(backend=BACKENDS[name]())
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)

    def explode(walk, ids):
        raise RuntimeError("forward broke")

    submodule.hook = explode
    result = engine.exec(Batch("LLM", "prefill", infos))
    assert set(result.errors) == {0, 1, 2}
    assert result.request_ids == ()
    assert not toy.length[: engine.capacity].any()
    assert not toy.length.any()
    submodule.hook = None
    assert generate(engine, infos, 2) == {i: expected([i + 1], 2) for i in range(3)}


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
    assert engine.max_packed_tokens("LLM", "prefill") == 64
    assert engine.max_packed_tokens("LLM", "decode") is None
    submodule.max_batch_size = lambda walk: 3
    assert engine.max_batch_size("LLM", "decode") == 3


def test_a_spec_for_an_unknown_node_is_refused_at_load():
    from mstar.engine.engine import Engine

    from .toy import ToySpec, ToySubmodule

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
