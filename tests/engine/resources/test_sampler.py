"""The sampler across steps: draws advance once per kept draw, and a request's tokens depend on it alone."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.sampler.config import SamplingReqConfig
from mstar.engine.resources.sampler.manager import SamplerManager

from .drive import CAPACITY, VOCAB, Rig

SAMPLED = SamplingReqConfig(temperature=1.0, _seed=5)


def logits_of(rid, draw):
    """What the model says for a request's ``draw``-th token: fixed by the two."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * abs(rid) + draw)) * 3


class Session:
    """A sampler fed with each request's own logits."""

    def __init__(self):
        self.rig = Rig(pages=256)
        self.rig.reserve(8, 8)
        self.tokens = {}

    def join(self, rid, row, config=SAMPLED):
        self.rig.join(rid, row, sampling=config)
        self.tokens[rid] = []

    def step(self, rids, padding=0, kept=None, **context):
        def forward(rig, ctx):
            return rig.sampler.sample(
                torch.stack([logits_of(r, len(self.tokens.get(r, ()))) for r in ctx.padded_request_ids])
            ).tolist()

        step = self.rig.step("sampler", kept_rids=kept)
        drawn = self.rig.run(rids, [1] * (len(rids) + padding), forward, step=step, padding=padding, **context)
        for rid, token in zip(rids, drawn, strict=False):
            if kept is None or rid in kept:
                self.tokens[rid].append(token)
        return drawn


def alone(rid, config, count):
    session = Session()
    session.join(rid, 0, config)
    for _ in range(count):
        session.step([rid])
    return session.tokens[rid]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_tokens_do_not_depend_on_row_neighbours_padding_or_slot(data):
    configs = {
        1: SamplingReqConfig(temperature=1.0, _seed=1),
        2: SamplingReqConfig(temperature=0.0, _seed=2),
        3: SamplingReqConfig(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02, _seed=3),
        4: SamplingReqConfig(temperature=1.3, top_p=0.8, top_p_first=True, top_k=30, top_p_min_keep=2, _seed=4),
    }
    session = Session()
    rows = data.draw(st.permutations(range(CAPACITY)))
    for rid, config in configs.items():
        session.join(rid, rows[rid], config)
    for _ in range(8):
        rids = data.draw(st.lists(st.sampled_from(sorted(configs)), min_size=1, unique=True))
        session.step(rids, padding=data.draw(st.integers(0, 3)), slot=data.draw(st.sampled_from([None, 0, 1])))
    for rid, config in configs.items():
        assert session.tokens[rid] == alone(rid, config, len(session.tokens[rid]))


def test_the_offset_counts_kept_draws_and_never_freezes():
    session = Session()
    session.join(1, 3)
    flat = torch.zeros(1, VOCAB)
    drawn = [
        session.rig.run([1], [1], lambda rig, ctx: rig.sampler.sample(flat).item(), step=session.rig.step("sampler"))
        for _ in range(10)
    ]
    assert session.rig.sampler.offset[3] == 10
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("slot", [None, 0])
def test_a_dropped_row_draws_but_keeps_nothing(slot):
    session = Session()
    session.join(1, 0)
    session.join(2, 1)
    session.step([1, 2], slot=slot)
    sampler = session.rig.sampler
    before = sampler.offset[0].item(), sampler.last_token[0].item()
    first = session.step([1, 2], kept=frozenset({2}), slot=slot)[0]
    assert (sampler.offset[0].item(), sampler.last_token[0].item()) == before
    assert sampler.offset[1] == 2
    assert session.step([1, 2], slot=slot)[0] == first, "the draw that was dropped is drawn again"
    session.step([1, 2], kept=frozenset(), slot=slot)
    assert sampler.offset[:2].tolist() == [2, 3]


def test_a_step_that_samples_nothing_leaves_the_state_alone():
    session = Session()
    session.join(1, 0)
    session.step([1])
    session.rig.run([1], [1], step=session.rig.step("sampler"))
    assert session.rig.sampler.offset[0] == 1


def test_padding_rows_keep_nothing():
    session = Session()
    session.join(1, 0)
    session.step([1], padding=3, slot=0)
    assert not session.rig.sampler.offset[CAPACITY:].any()
    assert not session.rig.sampler.last_token[CAPACITY:].any()
    assert session.rig.sampler.offset[:CAPACITY].sum() == 1


def test_loopback_tokens_are_each_rows_last_in_planned_order():
    session = Session()
    session.join(1, 6)
    session.join(2, 2)
    session.step([1, 2])
    last = {rid: tokens[-1] for rid, tokens in session.tokens.items()}
    step = session.rig.step("sampler")
    for slot in (None, 1):
        read = lambda rig, ctx: rig.sampler.loopback_tokens().tolist()  # noqa: E731
        assert session.rig.run([2, 1], [1, 1, 1], read, step=step, padding=1, slot=slot) == [last[2], last[1], 0]


def test_without_the_knob_no_last_tokens_are_kept(monkeypatch):
    monkeypatch.setenv("MSTAR_DEVICE_LOOPBACK", "0")
    session = Session()
    session.join(1, 0)
    session.step([1])
    assert not session.rig.sampler.has_slot_masters
    assert session.rig.sampler.last_token[0] == 0
    with pytest.raises(RuntimeError, match="MSTAR_DEVICE_LOOPBACK"):
        session.rig.sampler.loopback_tokens()


def test_a_reused_row_starts_over():
    session = Session()
    session.join(1, 0)
    for _ in range(3):
        session.step([1])
    session.rig.leave(1)
    session.join(2, 0)
    session.step([2])
    assert session.tokens[2] == alone(2, SAMPLED, 1)
    assert session.rig.sampler.offset[0] == 1


def test_ingest_again_takes_new_settings_and_keeps_the_draw_count():
    session = Session()
    session.join(1, 0, SamplingReqConfig(temperature=1.0, _seed=5))
    session.step([1], slot=0)
    session.rig.join(1, 0, SamplingReqConfig(temperature=0.0, _seed=5))
    session.step([1], slot=0)
    assert session.tokens[1][1] == int(logits_of(1, 1).argmax())
    assert session.rig.sampler.offset[0] == 2


def test_none_stands_for_the_default():
    nones = SamplingReqConfig(**{f.name: None for f in dataclasses.fields(SamplingReqConfig)})
    assert alone(1, nones, 6) == alone(1, SamplingReqConfig(), 6) == alone(1, None, 6)


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", 2**80), ("top_p_min_keep", 2**80), ("temperature", 1e300), ("_seed", -(10**30))]
)
def test_numbers_past_the_masters_range_give_a_token(field, value):
    (token,) = alone(1, SamplingReqConfig(**{"temperature": 1.0, field: value}), 1)
    assert 0 <= token < VOCAB


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 1.1},
        {"repetition_window": 4},
        {"repetition_penalty": 1.1, "repetition_window": 4},
        {"min_tokens": 3},
        {"temperature": float("nan")},
    ],
)
def test_what_the_sampler_cannot_do_is_refused_at_ingest_and_leaves_nothing(config):
    session = Session()
    with pytest.raises(ValueError, match="|".join(config)):
        session.rig.sampler.ingest_request(1, 0, SamplingReqConfig(**config))
    session.rig.join(2, 0)
    assert session.rig.sampler._settings["temperature"][0] == pytest.approx(0.6)


def test_a_row_without_usable_logits_is_a_fault_of_that_row_alone():
    session = Session()
    session.join(1, 0)
    session.join(2, 1)
    logits = torch.stack((torch.full((VOCAB,), torch.nan), logits_of(2, 0)))

    def forward(rig, ctx):
        return rig.sampler.sample(logits).tolist(), rig.sampler.faults().tolist()

    tokens, faults = session.rig.run([1, 2], [1, 1], forward, step=session.rig.step("sampler"))
    assert faults == [True, False]
    assert tokens == [0, *alone(2, SAMPLED, 1)]


def test_settings_are_gathered_once_while_the_batch_stays_the_same(monkeypatch):
    session = Session()
    session.join(1, 0)
    session.join(2, 1)
    session.step([1, 2], slot=0)
    assert isinstance(session.rig.sampler, SamplerManager)
    buffer = session.rig.sampler._buffers["temperature"]
    puts = []
    monkeypatch.setattr(buffer, "put", lambda *a, put=buffer.put: puts.append(1) or put(*a))
    session.step([1, 2], slot=0)
    assert not puts
    session.step([2, 1], slot=0)
    session.join(3, 2)
    session.step([2, 1], slot=0)
    assert len(puts) == 2
