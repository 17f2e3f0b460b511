"""Draws by the device's kernels, in Triton's interpreter here, and forwards that read last tokens themselves."""

import pytest
import torch

from mstar.engine.resources.sampler.config import SamplerStep, SamplingReqConfig
from mstar.kernels.embedding import embed_rows

from .sampler_session import PATHS, SAMPLED, VOCAB, Session, alone

pytest.importorskip("triton")

CONFIGS = {
    1: SamplingReqConfig(temperature=0.0),
    2: SamplingReqConfig(temperature=0.7, top_k=5, top_p=0.9, _seed=2),
    3: SamplingReqConfig(temperature=1.3, repetition_penalty=1.7, _seed=3),
}
WEIGHT = torch.randn(VOCAB, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["0", "1"], ids=["", "tokens-in-graph"])
def reads_in_graph(request, monkeypatch):
    monkeypatch.setenv("MSTAR_INGRAPH_DECODE_TOKENS", request.param)
    return request.param == "1"


@PATHS
def test_the_kernels_draw_what_the_host_does(in_graph, slot, reads_in_graph):
    session = Session(in_graph, draws_on_device=True)
    for rid, config in CONFIGS.items():
        session.join(rid, 2 * rid, config)
    for rids, kept in (([1, 2, 3], None), ([3, 1], frozenset({1})), ([3, 2], None)):
        session.step(rids, kept=kept, slot=slot, padding=1)
    for rid, config in CONFIGS.items():
        assert session.tokens[rid] == alone(rid, config, len(session.tokens[rid]))
        assert session.offset_of(2 * rid) == len(session.tokens[rid]) == 2
        assert session.last_tokens([rid], slot=slot) == session.tokens[rid][-1:]


@PATHS
def test_each_draw_of_one_forward_by_the_kernels_has_an_offset_of_its_own(in_graph, slot):
    session, host = Session(in_graph, draws_on_device=True), Session()
    for each in (session, host):
        each.join(1, 3)
    assert session.draw(1, times=3, slot=slot) == host.draw(1, times=3)
    assert session.offset_of(3) == 3


@PATHS
def test_the_kernels_look_back_at_every_draw_of_a_row_and_at_no_other_rows(in_graph, slot):
    session = Session(in_graph, on_host=False, draws_on_device=True)
    session.join(1, 5, SamplingReqConfig(temperature=0.0, repetition_penalty=2.0))
    session.join(2, 0, SamplingReqConfig(temperature=0.0, repetition_penalty=1.1, repetition_window=3))
    session.join(3, 1, SamplingReqConfig(temperature=0.0, min_tokens=2))
    logits = torch.zeros(4, VOCAB)
    for value, token in ((10, 5), (9, 8), (8, 11), (7, 3)):
        logits[:, token] = value

    def draw(ctx):
        return session.sampler.sample(logits.clone()).tolist()

    drawn = [session.run([1, 2, 3], draw, padding=1, slot=slot) for _ in range(7)]
    assert [row[0] for row in drawn] == [5, 8, 11, 3, 5, 5, 5]
    assert [row[1] for row in drawn] == [5, 5, 8, 5, 5, 5, 8]
    assert [row[2] for row in drawn] == [5] * 7


@PATHS
@pytest.mark.parametrize("draws_on_device", [False, True])
@pytest.mark.parametrize("draws", [0, 2])
def test_an_abandoned_step_puts_last_tokens_back(in_graph, slot, reads_in_graph, draws_on_device, draws):
    session = Session(in_graph, draws_on_device=draws_on_device)
    session.join(1, 4)
    session.step([1], slot=slot)
    before = session.state(4)
    ctx, step = session.context([1], padding=1, slot=slot), SamplerStep()
    session.sampler.plan(step, ctx)
    if not (reads_in_graph and in_graph and slot is not None):
        session.sampler.loopback_tokens()
    for _ in range(draws):
        session.sampler.sample(torch.zeros(2, VOCAB))
    session.sampler.abandon(step, ctx)
    assert session.state(4) == before
    session.step([1], slot=slot)
    assert session.tokens[1] == alone(1, SAMPLED, 2)


@PATHS
def test_a_leased_forward_finds_last_tokens_where_they_are_kept(in_graph, slot, reads_in_graph):
    session = Session(in_graph)
    for rid, row in ((1, 6), (2, 0)):
        session.join(rid, row)
    session.step([1, 2], slot=slot)

    def forward(ctx):
        return session.sampler.last_tokens_in_graph()

    found = session.run([2, 1], forward, slot=slot, padding=1, walk="read")
    if slot is None or not reads_in_graph:
        assert found is None
        return
    ids, x = embed_rows(WEIGHT, *found)
    assert ids[:2].tolist() == [session.tokens[2][-1], session.tokens[1][-1]]
    assert 0 <= ids[2] < VOCAB
    assert torch.equal(x, WEIGHT[ids])
    again = session.run([1], forward, slot=slot, padding=2, walk="read")
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in found]


def test_without_last_tokens_there_is_nothing_to_read(monkeypatch, reads_in_graph):
    monkeypatch.setenv("MSTAR_DEVICE_LOOPBACK", "0")
    session = Session(in_graph=True)
    session.join(1, 0)
    assert session.run([1], lambda ctx: session.sampler.last_tokens_in_graph(), slot=0) is None
    session.step([1], slot=0)
    assert session.tokens[1] == alone(1, SAMPLED, 1)


def test_a_step_repeats_in_the_graph_until_its_batch_or_a_setting_changes(reads_in_graph):
    session = Session(in_graph=True)
    for rid in (1, 2):
        session.join(rid, rid)
    step, contexts = SamplerStep(), {slot: session.context([1, 2], slot=slot) for slot in (None, 0, 1)}

    def repeats(slot):
        return session.sampler.repeats_in_graph(step, contexts[slot])

    def run(slot, ctx=None):
        ctx = ctx or contexts[slot]
        session.sampler.plan(step, ctx)
        session.forward(ctx)
        session.sampler.commit(step, ctx)

    assert not repeats(0), "never planned"
    for slot in contexts:
        run(slot)
    assert [repeats(slot) for slot in (None, 0, 1)] == [False, reads_in_graph, reads_in_graph]
    run(0, session.context([2, 1], slot=0))
    assert [repeats(slot) for slot in (0, 1)] == [False, reads_in_graph]
    run(0)
    assert repeats(0) == reads_in_graph
    session.join(1, 1, SamplingReqConfig(temperature=0.3))
    assert not repeats(0)
    run(0)
    assert repeats(0) == reads_in_graph
    session.join(3, 4)
    assert not repeats(0), "a new row is to be cleared first"
