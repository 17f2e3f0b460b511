"""Failures that other engines have had in sampling, each as a request to this one."""

import json

import numpy as np
import pytest
import torch

from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig, derive_seed

from .sampler_session import CAPACITY, PATHS, SAMPLED, VOCAB, Session, alone, logits_of

NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [*NOT_FINITE, -1, -1e-9])
def test_numbers_that_slip_past_comparisons_are_refused_in_words_that_are_json(field, value):
    session = Session()
    with pytest.raises(ValueError, match=f"^{field} must be ") as caught:
        session.sampler.ingest_request(1, 0, SamplingReqConfig(**{field: value}))
    assert json.loads(json.dumps({"error": str(caught.value)}, allow_nan=False))["error"] == str(caught.value)
    session.join(1, 0)
    session.step([1])
    assert session.tokens[1] == alone(1, SAMPLED, 1), "the next request is served"


@pytest.mark.parametrize("temperature", [-0.0, 1e-4, 1e-5, 1e-6, 1e-12, 5e-324, 2, 2.0001, 100, 1e30])
@pytest.mark.parametrize("top_p", [1, 1e-4])
def test_no_temperature_overflows_even_over_half_precision_logits(temperature, top_p):
    session, greedy = Session(), 8
    session.join(1, 0, SamplingReqConfig(temperature=temperature, top_p=top_p, _seed=3))
    logits = torch.linspace(-100, 90, VOCAB).to(torch.float16)[None]
    logits[0, greedy] = 100

    def forward(ctx):
        return session.sampler.sample(logits).item(), session.sampler.faults().item()

    for _ in range(5):
        token, fault = session.run([1], forward)
        assert fault == 0
        if temperature <= 1e-4 or top_p < 1:
            assert token == greedy
        assert 0 <= token < VOCAB


@PATHS
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SamplingReqConfig(temperature=0), SamplingReqConfig(temperature=1, top_k=64, top_p=0.95, _seed=3)),
        (SamplingReqConfig(temperature=1, top_k=0, _seed=2), SamplingReqConfig(temperature=1, top_k=1, _seed=3)),
    ],
)
def test_a_filter_may_be_on_in_one_row_and_off_in_another(in_graph, slot, first, second):
    session = Session(in_graph)
    session.join(1, 4, first)
    session.join(2, 1, second)
    for _ in range(8):
        session.step([1, 2], slot=slot)
    assert session.tokens == {1: alone(1, first, 8), 2: alone(2, second, 8)}


@pytest.mark.parametrize("batched", [False, True])
def test_greedy_and_top_k_1_take_the_lowest_of_tied_tokens_whatever_the_seed(batched):
    logits = torch.zeros(VOCAB)
    logits[[5, 9]] = 3.0
    session = Session()
    for number in range(100):
        kind = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "top_k": 1}
        rids = [1000 + number, 5000 + number] if batched else [1000 + number]
        for row, rid in enumerate(rids):
            session.join(rid, row, SamplingReqConfig(_seed=derive_seed(number, str(rid)), **kind))
        assert set(session.run(rids, lambda ctx: session.sampler.sample(logits.repeat(len(ctx.rows), 1)).tolist())) == {
            5
        }
        for rid in rids:
            session.leave(rid)


@pytest.mark.parametrize(
    ("top_p", "is_allowed"), [(0, 0), (1e-9, 1), (1e-4, 1), (1, 1), (1.0001, 0), (-0.1, 0), (2, 0)]
)
def test_extreme_top_p_is_refused_or_keeps_a_token(top_p, is_allowed):
    config = SamplingReqConfig(temperature=1.0, top_p=top_p, _seed=3)
    session = Session()
    if not is_allowed:
        with pytest.raises(ValueError, match=r"^top_p must be a finite number in \(0, 1\], got "):
            session.join(1, 0, config)
        return
    session.join(1, 0, config)
    session.step([1])
    assert 0 <= session.tokens[1][0] < VOCAB
    assert top_p == 1 or session.tokens[1][0] == int(logits_of(1, 0).argmax())


def test_min_p_with_a_seed_draws_what_it_keeps_and_draws_it_again():
    probabilities = torch.full((VOCAB,), 1e-30)
    probabilities[:4] = torch.tensor([0.05, 0.55, 0.10, 0.30])
    logits = probabilities.log()

    def drawn(seeds):
        session = Session()
        tokens = []
        for start in range(0, len(seeds), CAPACITY):
            batch = seeds[start : start + CAPACITY]
            for row, seed in enumerate(batch):
                session.join(seed, row, SamplingReqConfig(temperature=1.0, min_p=0.5, _seed=seed))
            tokens += session.run(batch, lambda ctx: session.sampler.sample(logits.repeat(len(ctx.rows), 1)).tolist())
            for seed in batch:
                session.leave(seed)
        return dict(zip(seeds, tokens, strict=True))

    first = drawn(list(range(17, 17 + 128)))
    assert set(first.values()) == {1, 3}
    assert drawn(list(first)[::-1]) == first


@PATHS
def test_a_seed_draws_the_same_whoever_sits_beside_it(in_graph, slot):
    seeded = {rid: SamplingReqConfig(temperature=0.8, _seed=seed) for rid, seed in ((1, 42), (5, 43), (6, 44))}
    neighbours = {
        2: SamplingReqConfig(temperature=0.8, _seed=derive_seed(99, "its own")),
        3: SamplingReqConfig(temperature=1.0, top_p=0.9, _seed=7),
        4: SamplingReqConfig(temperature=0.0),
    }
    batches = [[1], [1, 2], [1, 3], [1, 4], [4, 3, 2, 1], [1, 5, 6, 2]]
    rng, tokens = np.random.default_rng(0), []
    for batch in batches * 4:
        session = Session(in_graph)
        rows = rng.permutation(CAPACITY)
        for rid in batch:
            session.join(rid, int(rows[rid]), {**seeded, **neighbours}[rid])
        for _ in range(12):
            session.step(batch, padding=int(rng.integers(3)), slot=slot)
        tokens.append(session.tokens[1])
    assert all(each == tokens[0] for each in tokens)
    flat = torch.zeros(3, VOCAB)
    session = Session(in_graph)
    for rid, config in seeded.items():
        session.join(rid, rid, config)
    draws = [tuple(session.run([1, 5, 6], lambda ctx: session.sampler.sample(flat).tolist())) for _ in range(12)]
    assert len(set(zip(*draws, strict=True))) == 3, "distinct seeds differ over equal logits"


@PATHS
def test_a_step_that_keeps_no_draw_leaves_a_penalised_request_alone(in_graph, slot):
    session = Session(in_graph)
    session.join(1, 0, SamplingReqConfig(temperature=1.0, repetition_penalty=1.1))
    for start in (0, 256, 512):
        chunk = {1: torch.arange(start, start + 256) % VOCAB}
        session.step([1], kept=frozenset() if start < 512 else None, prompts=chunk, slot=slot)
    assert session.offset_of(0) == len(session.tokens[1]) == 1


def test_capabilities_that_are_off_cost_no_memory():
    spec = SamplerSpec("sampler", {"LLM"}, VOCAB, enable_repetion_penalty=False)
    session = Session(spec=spec)
    session.join(1, 0)
    session.run([1], session.forward, SamplerStep(prefill_tracked_tokens={1: torch.arange(5)}))
    history = session.sampler._history
    assert history.seen.host.size == history.ring.host.size == 0
