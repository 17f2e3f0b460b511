"""Any family's engine: replay equals eager over the real resources, whatever of them it uses."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, EagerBackend
from mstar.engine.batch import Batch
from mstar.engine.resources.sampler.config import SamplingReqConfig
from mstar.engine.resources.step import RequestOffloading

from .conformance import VOCAB, FamilyOptions, ingest, make_family, run, strict_backend

BACKENDS = {
    "eager": EagerBackend,
    "service": lambda: CpuGraphBackend(strict=False),
    "service-strict": lambda: CpuGraphBackend(strict=True),
    "as a device": strict_backend,
}
PLAIN, GUIDED = ("prefill", "decode"), ("guided_prefill", "guided")
FAMILIES = {
    "text": FamilyOptions(),
    "blocks": FamilyOptions(blocks=True),
    "regions": FamilyOptions(regions=True),
    "block regions": FamilyOptions(blocks=True, regions=True),
}
PROMPTS = {0: [1, 2, 3], 1: [7] * 9, 2: [60]}


@functools.cache
def made(family, backend):
    """One engine per combination, kept: a request leaves nothing behind."""
    return make_family(FAMILIES[family], BACKENDS[backend]())


@contextlib.contextmanager
def requests(engine, prompts, sampling=None):
    engine.eager_steps.clear()
    infos = ingest(engine, prompts, sampling)
    try:
        yield infos
    finally:
        for info in infos:
            engine.remove(info.request_id)


def every_page_is_free(engine):
    kv = engine.resources["kv_cache"]
    kv.check_pages()
    return kv.free_pages == kv.num_usable_pages


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_gives_the_dense_twin_s_tokens(family, backend):
    engine, twin = made(family, backend)
    assert every_page_is_free(engine)  # after warm-up
    with requests(engine, PROMPTS) as infos:
        assert run(engine, infos, 7) == {i: twin.dense_tokens(p, 7) for i, p in PROMPTS.items()}
    assert backend == "eager" or engine.dropped_buckets() == {"LLM": 0}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["text", "blocks"])
def test_guided_decoding_gives_the_dense_twin_s_tokens(family, backend):
    engine, twin = made(family, backend)
    with requests(engine, PROMPTS) as infos:
        assert run(engine, infos, 7, GUIDED) == {i: twin.dense_guided_tokens(p, 7) for i, p in PROMPTS.items()}
        assert bool(engine.eager_steps) == (backend == "eager")
    assert every_page_is_free(engine)


def test_guided_buckets_hold_both_labels_of_every_row():
    engine, _ = made("text", "as a device")
    with requests(engine, PROMPTS) as infos:
        run(engine, infos, 1, GUIDED)
        assert str(engine.exec(Batch("LLM", "guided", infos)).bucket) == "guided[bs=4,tokens=8,key=None]"


def test_guided_and_plain_requests_run_beside_each_other():
    engine, twin = made("text", "as a device")
    with requests(engine, PROMPTS) as infos, requests(engine, {9: [5, 6, 7, 8, 9]}) as (plain,):
        guided = run(engine, infos, 3, GUIDED)
        tokens = run(engine, [plain], 4)
        for _ in range(2):
            for info, token in zip(infos, engine.exec(Batch("LLM", "guided", infos)).host["new_token"], strict=True):
                guided[info.request_id].append(int(token))
        assert tokens == {9: twin.dense_tokens([5, 6, 7, 8, 9], 4)}
        assert guided == {i: twin.dense_guided_tokens(p, 5) for i, p in PROMPTS.items()}


@st.composite
def ragged_prompts(draw):
    """Up to 6 prompts, their tokens at, below and one above a bucket's."""
    rows = draw(st.integers(1, 6))
    total = draw(st.sampled_from([rows, 4, 5, 15, 16, 17, 48, 49]).filter(lambda total: total >= rows))
    cuts = sorted(draw(st.lists(st.integers(0, total - rows), min_size=rows - 1, max_size=rows - 1)))
    lengths = [b - a + 1 for a, b in zip([0, *cuts], [*cuts, total - rows], strict=True)]
    return [draw(st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n)) for n in lengths]


@pytest.mark.parametrize(
    ("family", "walks"),
    [("text", PLAIN), ("text", GUIDED), ("blocks", PLAIN), ("blocks", GUIDED), ("regions", PLAIN)],
    ids=["text", "guided text", "blocks", "guided blocks", "regions"],
)
@settings(max_examples=12, deadline=None)
@given(prompts=ragged_prompts(), seed=st.integers(0, 5))
def test_random_ragged_batches_replay_as_they_run_eager(family, walks, prompts, seed):
    tokens = []
    for backend in ("eager", "as a device"):
        engine, _ = made(family, backend)
        with requests(engine, dict(enumerate(prompts)), SamplingReqConfig(temperature=1.0, _seed=seed)) as infos:
            tokens.append(run(engine, infos if walks is PLAIN else infos[:4], 4, walks))
        assert every_page_is_free(engine)
    assert tokens[0] == tokens[1]


# Regions


@pytest.mark.parametrize(
    ("prompts", "path"),
    [
        ({0: [1, 2]}, "region"),
        ({0: [1, 2], 1: [3] * 9, 2: [4]}, "region"),
        ({0: [1] * 16}, "region"),
        ({0: [1] * 17}, "plain"),
        ({i: [i] for i in range(5)}, "plain"),
    ],
)
def test_a_prompt_step_takes_its_layers_region_where_one_fits(prompts, path):
    engine, twin = made("regions", "as a device")
    with requests(engine, prompts) as infos:
        assert run(engine, infos, 3) == {i: twin.dense_tokens(p, 3) for i, p in prompts.items()}
    assert twin.paths[-3] == path
    assert set(engine.eager_steps) == {("LLM", walk, "no_capture") for walk in PLAIN}


def test_can_lease_turns_a_batch_down_and_the_outer_step_keeps_the_resources():
    options = FamilyOptions(regions=True, can_lease=lambda rows: len(rows) == 1)
    engine, twin = make_family(options)
    assert run(engine, ingest(engine, PROMPTS), 2) == {i: twin.dense_tokens(p, 2) for i, p in PROMPTS.items()}
    assert twin.paths[-2:] == ["plain", "plain"]
    assert run(engine, ingest(engine, {7: [1, 2]}), 2) == {7: twin.dense_tokens([1, 2], 2)}
    assert twin.paths[-2:] == ["region", "region"]


def test_a_padded_region_takes_only_the_pages_of_its_real_tokens():
    engine, _ = made("regions", "as a device")
    kv = engine.resources["kv_cache"]
    with requests(engine, {0: [1] * 5}) as infos:
        run(engine, infos, 1)
        assert kv.num_usable_pages - kv.free_pages == 2
        kv.check_pages()


# Offload


@pytest.mark.parametrize("walks", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_a_request_moved_to_the_host_and_back_goes_on_as_if_nothing_happened(walks):
    engine, twin = make_family(offload_pages=32)
    kv = engine.resources["kv_cache"]
    infos = ingest(engine, PROMPTS)
    tokens, free = run(engine, infos, 3, walks), kv.free_pages

    def decode(rows):
        result = engine.exec(Batch("LLM", walks[1], rows))
        for request_id, token in zip(result.request_ids, result.host.get("new_token", ()), strict=True):
            tokens[request_id].append(int(token))
        return result

    assert kv.offload(1)
    assert kv.is_offloaded(1)
    assert kv.free_pages > free
    refused = decode(infos).refused
    assert refused is not None
    assert refused.reason == RequestOffloading(1)
    (newcomer,) = ingest(engine, {5: [8] * 20})  # takes the pages that were freed
    run(engine, [newcomer], 2)
    for _ in range(2):
        decode([infos[0], infos[2]])
    assert kv.reload(1)
    kv.check_pages()
    for _ in range(3):
        decode(infos)
    dense = twin.dense_tokens if walks is PLAIN else twin.dense_guided_tokens
    assert tokens == {i: dense(p, len(tokens[i])) for i, p in PROMPTS.items()}
    assert [len(own) for own in tokens.values()] == [8, 6, 8]


def test_a_replay_that_would_read_what_moved_since_the_capture_is_caught(caplog):
    engine, family = make_family()
    (info,) = ingest(engine, {0: [1, 2]})
    run(engine, [info], 2)
    family.head = torch.nn.Linear(*family.head.weight.shape[::-1], bias=False)  # a graph would read the old weights
    engine.exec(Batch("LLM", "decode", [info]))
    assert "not where the capture read it" in caplog.text


def test_a_forward_that_fails_behind_a_committed_region_fails_its_rows_and_commits_nothing_twice(monkeypatch):
    engine, family = make_family(FamilyOptions(regions=True))
    infos = ingest(engine, {0: [1, 2, 3], 1: [7, 8]})
    head = family._head

    def fails_once(engine_inputs, x):
        monkeypatch.setattr(family, "_head", head)
        raise RuntimeError("lost")

    monkeypatch.setattr(family, "_head", fails_once)
    result = engine.exec(Batch("LLM", "prefill", infos))
    assert {i: str(error) for i, error in result.errors.items()} == {0: "lost", 1: "lost"}
    stored = engine.resources["kv_cache"].stored_len
    assert [int(stored[info.row]) for info in infos] == [3, 2]
    for info in infos:
        engine.remove(info.request_id)
    assert run(engine, ingest(engine, {2: [1, 2, 3]}), 1)[2] == family.dense_tokens([1, 2, 3], 1)
