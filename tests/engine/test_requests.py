"""What a request finds when it arrives: its row, and the prefix of its prompt that is cached already."""

import numpy as np
import pytest
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend
from mstar.engine.batch import Batch
from mstar.engine.engine import Engine

from .toy import ToySpec, ToySubmodule, expected, make_engine, request

PROMPT = [4, 5, 6, 7]


def two_caches(first, second, **attributes):
    engine = Engine(
        {"LLM": ToySubmodule()},
        [ToySpec("toy", {"LLM"}), ToySpec("other", {"LLM"})],
        device="cpu",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        capacity=2,
        backend=CpuGraphBackend(),
    )
    engine.warm_up()
    toy, other = engine.resources["toy"], engine.resources["other"]
    toy.cached, other.cached = first, second
    for name, value in attributes.items():
        setattr(other, name, value)
    return engine, toy, other


@pytest.mark.parametrize(
    ("first", "second", "safe", "matched"),
    [
        (3, 2, True, 2),  # what all caches hold
        (2, 3, True, 2),
        (3, None, True, 3),  # a resource without a cache has no say
        (3, 0, True, 0),
        (None, None, True, 0),
        (3, 3, False, 0),  # unless it cannot begin behind a prefix
    ],
)
def test_every_resource_begins_behind_the_same_prefix(first, second, safe, matched):
    engine, toy, other = two_caches(first, second, prefix_skip_safe=safe)
    info = request(0, PROMPT)
    engine.ingest(info)
    assert info.cached_tokens == matched
    assert toy.applied == other.applied == {0: matched}  # also when it is 0
    result = engine.exec(Batch("LLM", "prefill", [info]))
    assert result.host["new_token"].tolist() == expected(PROMPT[matched:], 0)


def test_only_the_first_step_of_a_request_leaves_its_cached_tokens_out():
    engine, _, toy = make_engine()
    toy.cached = 3
    info, plain = request(0, PROMPT), request(1, PROMPT)
    engine.ingest(info)
    toy.cached = None
    engine.ingest(plain)
    batch = Batch("LLM", "prefill", [info, plain])
    first, second = engine.exec(batch), engine.exec(batch)
    assert first.host["new_token"].tolist() == [expected(PROMPT[3:], 0)[0], expected(PROMPT, 0)[0]]
    assert second.host["new_token"].tolist() == [expected(PROMPT, 0)[0]] * 2


@pytest.mark.parametrize("preplans", [False, True])
def test_a_first_step_that_did_not_run_is_cut_again(preplans):
    engine, submodule, toy = make_engine(preplans=preplans)
    toy.cached = 3
    info = request(0, PROMPT)
    engine.ingest(info)
    batch = Batch("LLM", "prefill", [info])
    if preplans:
        engine.pre_plan(batch)
    else:
        toy.budget = 0
        assert engine.exec(batch).refused is not None
        toy.budget = 100
        submodule.hook = lambda walk, ids: 1 / 0
        assert set(engine.exec(batch).errors) == {0}
        submodule.hook = None
    assert engine.exec(batch).host["new_token"].tolist() == expected(PROMPT[3:], 0)


def test_a_split_that_fails_fails_its_row_alone():
    engine, submodule, toy = make_engine()
    toy.cached = 2
    info, plain = request(0, PROMPT), request(1, [1])
    engine.ingest(info)
    toy.cached = None
    engine.ingest(plain)
    submodule.split_inputs = None
    result = engine.exec(Batch("LLM", "prefill", [info, plain]))
    assert set(result.errors) == {0}
    assert result.request_ids == (1,)


def test_a_request_that_leaves_before_its_first_step_takes_its_prefix_along():
    engine, _, toy = make_engine()
    toy.cached = 3
    engine.ingest(request(0, PROMPT))
    engine.remove(0)
    toy.cached = None
    engine.ingest(again := request(0, PROMPT))
    assert again.cached_tokens == 0
    assert engine.exec(Batch("LLM", "prefill", [again])).host["new_token"].tolist() == expected(PROMPT, 0)


def test_a_cache_that_raises_leaves_nothing_behind():
    engine, submodule, toy = make_engine(capacity=1)
    toy.cached = 1

    def broken(request_id):
        raise RuntimeError("no such page")

    toy.resolve_cached_prefix = broken
    info = request(0, PROMPT)
    with pytest.raises(RuntimeError, match="no such page"):
        engine.ingest(info)
    assert 0 not in toy.requests
    assert submodule.cleaned == [0]
    del toy.resolve_cached_prefix
    engine.ingest(request(1, PROMPT))  # the only row is free again


def test_kept_tokens_reach_the_chains_by_master_row():
    engine, _, toy = make_engine(capacity=4)
    infos = [request(i) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    rows, tokens = np.array([info.row for info in infos]), np.array([10, 11, 12])
    engine.extend_prefix_chains(rows, tokens)
    engine.extend_prefix_chains(rows, tokens + 10)
    engine.extend_prefix_chains(rows[[2, 0]], tokens[:2])
    assert toy.chains == [([3, 2, 1], [10, 11, 12]), ([3, 2, 1], [20, 21, 22]), ([1, 3], [10, 11])]


def test_rows_are_looked_up_as_they_are_now():
    engine, _, _ = make_engine(capacity=3)
    table = engine._requests
    for i in range(3):
        engine.ingest(request(i))
    assert table.rows_of((2, 0)).tolist() == [0, 2]
    engine.remove(0)
    engine.remove(1)
    for i in (1, 0):  # each on the other's former row
        engine.ingest(request(i))
    assert table.rows_of((2, 0)).tolist() == [0, 1]
    with pytest.raises(KeyError):
        table.rows_of((2, 7))


def test_a_batch_that_names_rows_of_requests_that_have_left_is_refused():
    engine, _, _ = make_engine()
    info = request(3, PROMPT)
    engine.ingest(info)
    rows, ids = np.array([info.row]), np.array([3])
    engine.exec(Batch("LLM", "prefill", [info], rows=rows, ids=ids))
    engine.remove(3)
    with pytest.raises(KeyError, match="request 3 was not ingested"):
        engine.exec(Batch("LLM", "decode", [info], rows=rows, ids=ids))
    other = request(4, PROMPT)
    engine.ingest(other)
    assert other.row == rows[0]
    with pytest.raises(KeyError, match="request 3 was not ingested"):
        engine.exec(Batch("LLM", "decode", [info], rows=rows, ids=ids))


def test_only_requests_that_choose_captures_are_asked_about():
    engine, submodule, _ = make_engine()
    asked = []
    submodule.chooses_capture = lambda info: info.request_id == 1
    submodule.cg_key_info = lambda walk, infos: asked.append([info.request_id for info in infos])
    submodule.eager_reason = submodule.cg_key_info
    infos = [request(i, PROMPT) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    engine.exec(Batch("LLM", "prefill", infos))
    engine.remove(1)
    engine.exec(Batch("LLM", "prefill", [infos[0], infos[2]]))
    assert asked == [[1], [1], [], []]
