"""The sampler across steps: draws advance once per kept draw, and a request's tokens depend on it alone."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig

from .sampler_session import CAPACITY, PATHS, PLAIN, SAMPLED, SPEC, VOCAB, Session, alone, logits_of


@settings(max_examples=25, deadline=None)
@given(data=st.data(), in_graph=st.booleans(), on_host=st.booleans())
def test_tokens_do_not_depend_on_row_neighbours_padding_slot_or_path(data, in_graph, on_host):
    configs = {
        1: SamplingReqConfig(temperature=1.0, _seed=1),
        2: SamplingReqConfig(temperature=0.0, _seed=2),
        3: SamplingReqConfig(temperature=0.7, top_k=5, top_p=0.9, min_p=0.02, _seed=3),
        4: SamplingReqConfig(temperature=1.3, top_p=0.8, top_p_first=True, top_k=30, top_p_min_keep=2, _seed=4),
        5: SamplingReqConfig(temperature=0.9, repetition_penalty=1.7, _seed=5),
        6: SamplingReqConfig(temperature=0.0, repetition_penalty=1.4, repetition_window=3),
        7: SamplingReqConfig(temperature=1.0, repetition_penalty=0.7, repetition_window=9, min_tokens=4, _seed=7),
    }
    session = Session(in_graph, on_host=on_host)
    rows = data.draw(st.permutations(range(CAPACITY)))
    for rid, config in configs.items():
        session.join(rid, rows[rid], config)
    for _ in range(6):
        rids = data.draw(st.lists(st.sampled_from(sorted(configs)), min_size=1, unique=True))
        kept = data.draw(st.none() | st.frozensets(st.sampled_from(rids)))
        slot = data.draw(st.sampled_from([None, 0, 1]))
        session.step(rids, padding=data.draw(st.integers(0, min(3, CAPACITY - len(rids)))), slot=slot, kept=kept)
    for rid, config in configs.items():
        assert session.tokens[rid] == alone(rid, config, len(session.tokens[rid]))
        assert session.offset_of(rows[rid]) == len(session.tokens[rid])


@PATHS
def test_the_offset_counts_kept_draws_and_never_freezes(in_graph, slot):
    session = Session(in_graph)
    session.join(1, 3)
    drawn = [token for _ in range(10) for token in session.draw(1, slot=slot)]
    assert session.offset_of(3) == 10
    assert len(set(drawn)) > 1


@PATHS
def test_each_draw_of_one_forward_has_an_offset_of_its_own(in_graph, slot):
    session = Session(in_graph)
    session.join(1, 3)
    drawn = session.draw(1, times=3, slot=slot) + session.draw(1, times=3, slot=slot)
    assert session.offset_of(3) == 6
    session.leave(1)
    session.join(1, 3)
    assert drawn == [token for _ in range(6) for token in session.draw(1, slot=slot)]


@PATHS
def test_a_dropped_row_draws_but_keeps_nothing(in_graph, slot):
    session = Session(in_graph)
    session.join(1, 0)
    session.join(2, 1)
    session.step([1, 2], slot=slot)
    before = session.state(0)
    session.step([1, 2], kept=frozenset({2}), slot=slot)
    assert session.state(0) == before
    assert session.offset_of(1) == 2
    session.step([1, 2], kept=frozenset(), slot=slot)
    assert [session.offset_of(row) for row in (0, 1)] == [1, 2]
    session.step([1, 2], slot=slot)
    assert session.tokens[1] == alone(1, SAMPLED, 2)
    assert session.tokens[2] == alone(2, SAMPLED, 3)


@PATHS
def test_a_step_that_samples_nothing_leaves_the_state_alone(in_graph, slot):
    session = Session(in_graph)
    session.join(1, 0)
    session.step([1], slot=slot)
    before = session.state(0)
    session.run([1], lambda ctx: None, slot=slot, walk="encode")
    assert session.state(0) == before


@PATHS
def test_loopback_tokens_are_each_rows_last_in_planned_order(in_graph, slot):
    session = Session(in_graph)
    session.join(1, 6)
    session.join(2, 2)
    assert session.last_tokens([1, 2], slot=slot) == [0, 0], "a new request has none"
    for _ in range(3):
        session.step([1, 2], slot=slot)
        last = {rid: tokens[-1] for rid, tokens in session.tokens.items()}
        assert session.last_tokens([2, 1], slot=slot) == [last[2], last[1]]
        *rows, padding = session.last_tokens([2, 1], padding=1, slot=1)
        assert rows == [last[2], last[1]]
        assert 0 <= padding < VOCAB


@PATHS
def test_without_the_knob_no_last_tokens_are_kept(in_graph, slot, monkeypatch):
    monkeypatch.setenv("MSTAR_DEVICE_LOOPBACK", "0")
    session = Session(in_graph)
    session.join(1, 0)
    session.step([1], slot=slot)
    assert not session.sampler.has_slot_masters
    assert not session.sampler._masters.last_token.any()
    assert session.tokens[1] == alone(1, SAMPLED, 1)
    with pytest.raises(RuntimeError, match="MSTAR_DEVICE_LOOPBACK"):
        session.sampler.loopback_tokens()


@PATHS
def test_a_reused_row_starts_over(in_graph, slot):
    session = Session(in_graph)
    session.join(1, 0)
    for _ in range(3):
        session.step([1], slot=slot)
    session.leave(1)
    session.join(2, 0)
    assert session.sampler.offset_of(0) == 0
    assert session.last_tokens([2], slot=slot) == [0]
    session.step([2], slot=slot)
    assert session.tokens[2] == alone(2, SAMPLED, 1)
    assert session.offset_of(0) == 1


@PATHS
def test_ingest_again_takes_new_settings_and_keeps_the_draw_count(in_graph, slot):
    session = Session(in_graph)
    session.join(1, 0, SamplingReqConfig(temperature=1.0, _seed=5))
    session.step([1], slot=slot)
    session.join(1, 0, SamplingReqConfig(temperature=0.0, _seed=5))
    session.step([1], slot=slot)
    assert session.tokens[1][1] == int(logits_of(1, 1).argmax())
    assert session.offset_of(0) == 2


@PATHS
def test_several_requests_registered_before_one_step_each_keep_their_settings(in_graph, slot):
    configs = {rid: SamplingReqConfig(temperature=0.5 + 0.1 * rid, top_k=rid, _seed=rid) for rid in range(2, 6)}
    session = Session(in_graph)
    for rid, config in configs.items():
        session.join(rid, rid, SamplingReqConfig(temperature=0.0))
        session.join(rid, rid, config)
    for _ in range(4):
        session.step(list(configs), slot=slot)
    assert session.tokens == {rid: alone(rid, config, 4) for rid, config in configs.items()}


@pytest.mark.parametrize(
    ("in_graph", "slot", "moved"),
    [
        (False, None, "host_scatter_steps"),
        (False, 0, "host_scatter_steps"),
        (True, None, "host_scatter_steps"),
        (True, 0, "ingraph_scatter_steps"),
    ],
)
def test_only_leased_steps_scatter_in_the_graph_and_the_counters_say_so(in_graph, slot, moved):
    session = Session(in_graph)
    session.join(1, 0)
    masters, after_forward = session.sampler._masters, []

    def forward(ctx):
        session.forward(ctx)
        after_forward.append(masters.offset[0].item())

    for _ in range(3):
        session.run([1], forward, slot=slot)
    assert after_forward == ([1, 2, 3] if moved == "ingraph_scatter_steps" else [0, 1, 2])
    counts = {name: session.sampler.counters[name] for name in ("host_scatter_steps", "ingraph_scatter_steps")}
    assert counts == dict.fromkeys(counts, 0) | {moved: 3}
    assert session.sampler.counters["loopback_steps"] == 0
    session.last_tokens([1], slot=slot)
    assert session.sampler.counters["loopback_steps"] == 1


def test_a_row_beyond_the_masters_names_the_variable():
    session = Session(in_graph=True, slots="3")
    session.join(1, 2)
    with pytest.raises(RuntimeError, match="MSTAR_SAMPLER_SLOTS=3"):
        session.sampler.ingest_request(2, 3, SAMPLED)
    session.step([1], padding=2, slot=0)
    assert session.offset_of(2) == 1


def test_none_stands_for_the_default():
    nones = SamplingReqConfig(**{f.name: None for f in dataclasses.fields(SamplingReqConfig)})
    assert alone(1, nones, 6) == alone(1, SamplingReqConfig(), 6) == alone(1, None, 6)


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", 2**80), ("top_p_min_keep", 2**80), ("temperature", 1e300), ("_seed", -(10**30))]
)
def test_numbers_past_the_masters_range_give_a_token(field, value):
    (token,) = alone(1, SamplingReqConfig(**{"temperature": 1.0, field: value}), 1)
    assert 0 <= token < VOCAB


BARE = SamplerSpec("sampler", {"LLM"}, VOCAB, enable_repetion_penalty=False)


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (BARE, {"repetition_penalty": 1.1}),
        (BARE, {"repetition_window": 4}),
        (BARE, {"min_tokens": 3}),
        (BARE, {"min_p": 0.1}),
        (BARE, {"top_p_first": True}),
        (SPEC, {"repetition_window": 17}),
        (SPEC, {"temperature": float("nan")}),
    ],
)
def test_what_the_spec_does_not_allow_is_refused_at_ingest_and_leaves_nothing(spec, config):
    session = Session(spec=spec)
    before = session.state(0)
    with pytest.raises(ValueError, match=next(iter(config))):
        session.sampler.ingest_request(1, 0, SamplingReqConfig(**config))
    assert session.state(0) == before
    assert not session.sampler._history.is_used


@pytest.mark.parametrize(("apply_penalty", "nothing_left"), [(True, 2), (False, 1)])
def test_a_row_without_usable_logits_is_a_fault_of_that_row_alone(apply_penalty, nothing_left):
    session, bad = Session(), (torch.nan, torch.inf, -torch.inf)
    rows = [logits_of(2, 0)] + [torch.zeros(VOCAB).index_fill(0, torch.tensor([7]), value) for value in bad[:2]]
    rows.append(torch.full((VOCAB,), bad[2]))
    for rid in (2, 3, 4, 5):
        session.join(rid, rid)

    def forward(ctx):
        tokens, faults = session.sampler.sample(torch.stack(rows)), session.sampler.faults()
        assert faults.dtype == torch.int8
        return tokens.tolist(), faults.tolist()

    tokens, faults = session.run([2, 3, 4, 5], forward, SamplerStep(apply_penalty=apply_penalty))
    assert faults == [0, 1, 1, nothing_left]
    assert tokens == [*alone(2, SAMPLED, 1), 0, 0, 0]


def test_filters_can_be_left_out_of_a_step():
    drawn = {}
    for apply_filters in (True, False):
        session = Session()
        session.join(1, 0, SamplingReqConfig(temperature=1.0, top_k=1, _seed=5))
        step = SamplerStep(apply_filters=apply_filters)
        drawn[apply_filters] = {token for _ in range(8) for token in session.draw(1, step=step)}
    assert drawn[True] == {0}
    assert len(drawn[False]) > 1


@PATHS
@pytest.mark.parametrize("loops_back", [True, False])
@pytest.mark.parametrize("draws", [0, 1, 2])
def test_an_abandoned_step_leaves_what_the_last_commit_did_and_can_run_again(in_graph, slot, loops_back, draws):
    session = Session(in_graph)
    session.join(1, 0)
    session.join(2, 1)
    session.step([1, 2], slot=slot)
    before = [session.state(row) for row in (0, 1)]
    ctx = session.context([1, 2], padding=1, slot=slot)
    session.sampler.plan(PLAIN, ctx)
    if loops_back:
        session.sampler.loopback_tokens()
    for _ in range(draws):
        session.forward(ctx)
    session.sampler.abandon(PLAIN, ctx)
    if loops_back or not draws:
        assert [session.state(row) for row in (0, 1)] == before
    for rid in (1, 2):
        session.step([rid])
        assert session.tokens[rid] == alone(rid, SAMPLED, 2)


def test_abandoning_before_the_sampler_was_planned_does_not_touch_the_committed_step():
    session = Session(in_graph=True)
    session.join(1, 0)
    ctx = session.context([1], slot=0)
    session.sampler.plan(PLAIN, ctx)
    session.sampler.loopback_tokens()
    session.forward(ctx)
    session.sampler.commit(PLAIN, ctx)
    before = session.state(0)
    session.sampler.abandon(PLAIN, session.context([1], slot=1))
    assert session.state(0) == before


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_replay_that_runs_no_python_advances_what_its_capture_does(in_graph):
    session = Session(in_graph)
    session.join(1, 0)
    session.draw(1, times=2, slot=0)
    ctx = session.context([1], slot=0)
    session.sampler.plan(PLAIN, ctx)
    recorded = session.sampler._planned
    for _ in range(2):
        session.sampler.sample(torch.zeros(1, VOCAB))
    session.sampler._planned = dataclasses.replace(recorded, draws=0, faults=None)
    session.sampler.commit(PLAIN, ctx)
    assert session.offset_of(0) == 4


class TestPlanningAhead:
    """Settings are staged while the step before still runs; draw state waits for its commit."""

    def planned_ahead(self, session, rids, slot, meanwhile):
        """Draws of a step on ``slot`` that is planned ahead of what ``meanwhile`` does."""
        ctx = session.context(rids, slot=slot)
        session.sampler.plan(PLAIN, dataclasses.replace(ctx, is_preplan=True))
        meanwhile()
        session.sampler.promote_preplan(PLAIN, ctx)
        drawn = session.forward(ctx)
        session.sampler.commit(PLAIN, ctx)
        return drawn

    @pytest.mark.parametrize("in_graph", [False, True])
    def test_a_promoted_plan_draws_at_the_offset_after_the_step_before(self, in_graph):
        session = Session(in_graph)
        session.join(1, 0)
        session.step([1], slot=1)
        drawn = self.planned_ahead(session, [1], 0, lambda: session.step([1], slot=1))
        assert [*session.tokens[1], *drawn] == alone(1, SAMPLED, 3)
        assert session.offset_of(0) == 3

    def test_settings_that_move_after_staging_are_not_the_stale_ones(self):
        session = Session()
        session.join(1, 0)
        greedy = lambda: session.join(1, 0, SamplingReqConfig(temperature=0.0))  # noqa: E731
        assert self.planned_ahead(session, [1], 0, greedy) == [int(logits_of(1, 0).argmax())]

    def test_staging_touches_neither_draw_state_nor_the_step_in_progress(self):
        session = Session()
        session.join(1, 0)
        session.join(2, 1, SamplingReqConfig(temperature=0.0))
        ctx = session.context([1], slot=0)
        session.sampler.plan(PLAIN, ctx)
        session.sampler.plan(PLAIN, dataclasses.replace(session.context([2], slot=1), is_preplan=True))
        session.sampler.clear_preplan()
        assert session.forward(ctx) == alone(1, SAMPLED, 1)
        session.sampler.commit(PLAIN, ctx)
        assert [session.offset_of(row) for row in (0, 1)] == [1, 0]

    def test_a_staged_batch_is_not_gathered_again(self):
        session = Session()
        session.join(1, 0)
        self.planned_ahead(session, [1], 0, lambda: None)
        assert session.sampler.counters["static_gathers"] == 1
        assert session.sampler.counters["static_gather_hits"] == 1


def test_the_sampler_stages_through_slots():
    sampler = Session().sampler
    assert sampler.force_double_buffer
    assert sampler.supports_preplan


@settings(max_examples=20, deadline=None)
@given(
    operations=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=30), in_graph=st.booleans()
)
def test_over_random_arrivals_and_departures_offsets_are_the_draws_since_arrival(operations, in_graph):
    session, rows, draws = Session(in_graph), {}, {}
    for number, (rid, leaves) in enumerate(operations):
        if leaves and rid in rows:
            session.leave(rid)
            del rows[rid], draws[rid]
        elif rid not in rows:
            rows[rid] = min(set(range(CAPACITY)) - set(rows.values()))
            draws[rid] = 0
            session.join(rid, rows[rid])
        if rows:
            session.step(list(rows), padding=number % 3, slot=(None, 0, 1)[number % 3])
            draws = {rid: count + 1 for rid, count in draws.items()}
        assert {rid: session.offset_of(row) for rid, row in rows.items()} == draws
