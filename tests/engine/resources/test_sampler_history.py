"""What a request's own tokens do to its next one, over steps: penalties, least length, and whose tokens count."""

import dataclasses
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.sampler.config import SamplerStep, SamplingReqConfig

from .float64_sampler import Float64Sampler
from .sampler_session import PATHS, PLAIN, SPEC, STOP_IDS, VOCAB, Session, logits_of

IN_INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="needs Triton's interpreter"
)
FORMS = pytest.mark.parametrize(
    "on_host", [pytest.param(True, id="arrays"), pytest.param(False, id="kernels", marks=IN_INTERPRETER)]
)
RUNS = pytest.mark.parametrize(
    ("in_graph", "slot", "on_host"),
    [
        *[(in_graph, slot, True) for in_graph in (False, True) for slot in (None, 0)],
        *[pytest.param(in_graph, slot, False, marks=IN_INTERPRETER) for in_graph, slot in ((False, None), (True, 0))],
    ],
)
SEEN = SamplingReqConfig(temperature=1.0, repetition_penalty=1.8, _seed=7)
WINDOWED = SamplingReqConfig(temperature=1.0, repetition_penalty=1.5, repetition_window=4, _seed=8)
SHORT = SamplingReqConfig(temperature=1.0, min_tokens=6, _seed=9)
CONFIGS = {
    "seen": SEEN,
    "seen-output-only": dataclasses.replace(SEEN, penalize_prompt=False),
    "windowed": WINDOWED,
    "window-16": dataclasses.replace(WINDOWED, repetition_window=16, top_k=9),
    "window-1": dataclasses.replace(WINDOWED, repetition_window=1, temperature=0.0),
    "greedy-seen": SamplingReqConfig(temperature=0.0, repetition_penalty=1.8),
    "encouraged": SamplingReqConfig(temperature=0.8, repetition_penalty=0.6, top_p=0.7, _seed=3),
    "short": SHORT,
    "short-greedy": SamplingReqConfig(temperature=0.0, min_tokens=20),
    "everything": SamplingReqConfig(
        temperature=0.9,
        top_k=30,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        min_tokens=30,
        top_p_first=True,
        top_p_min_keep=2,
        _seed=4,
    ),
    "top-k-1": SamplingReqConfig(temperature=1.0, top_k=1, repetition_penalty=1.4),
    "plain": SamplingReqConfig(temperature=1.0, _seed=5),
}
PROMPT = [4, 9, 9, 60, VOCAB - 1]


def feed(logits):
    """A forward that draws from the same logits [V] in every row."""
    return lambda session: lambda ctx: session.sampler.sample(logits.repeat(ctx.rows.size, 1)).tolist()


def drawn(session, rid, logits, step=PLAIN, **context):
    return session.run([rid], feed(logits)(session), step, **context)[0]


def certain(*order):
    """Logits that fall along ``order``, from 10 in steps of 1; all other tokens at 0."""
    logits = torch.zeros(VOCAB)
    for i, token in enumerate(order):
        logits[token] = 10.0 - i
    return logits


class TestAgainstTheFloat64Sampler:
    """Rows join at steps 0, 5, 12 and 20, one leaves and its row is used again, filters and penalties are left out
    of some steps and some draws are dropped: every token is the reference's."""

    JOINS = {0: (1, 2, 3), 5: (4, 5), 12: (6,), 20: (7,)}

    @RUNS
    @pytest.mark.parametrize("half", [0, 1])
    def test_sixty_steps(self, in_graph, slot, on_host, half):
        session, names = Session(in_graph, on_host=on_host), list(CONFIGS)[half * 6 :]
        references, rows, won = {}, {}, []
        for number in range(60):
            for rid in self.JOINS.get(number, ()):
                name = names[(rid - 1) % len(names)]
                rows[rid] = rid if rid < 7 else rows.pop(2)
                if rid == 7:
                    session.leave(2)
                    references.pop(2)
                session.join(rid, rows[rid], CONFIGS[name])
                references[rid] = Float64Sampler(CONFIGS[name], STOP_IDS, PROMPT)
                session.step([rid], kept=frozenset(), prompts={rid: torch.tensor(PROMPT)}, slot=slot)
            rids = [rid for rid in references if (number + rid) % 5]
            kept = frozenset(rids) if number % 7 else frozenset(rids[1:])
            flags = {"apply_filters": number % 9 != 4, "apply_penalty": number % 8 != 3}
            wanted = {rid: references[rid].draw(logits_of(rid, len(session.tokens[rid])), **flags) for rid in rids}
            step = SamplerStep(kept_rids=kept, **flags)
            got = session.run(rids, session.forward, step, padding=number % 3, slot=slot)
            for rid, token in zip(rids, got, strict=False):
                if rid in kept:
                    assert token == wanted[rid][0], (number, rid, wanted[rid])
                    won.append(wanted[rid][1])
                    session.tokens[rid].append(token)
                    references[rid].tokens.append(token)
        assert len(won) > 200
        assert min(won) > 1e-6, "a draw that close may go either way in single precision"

    @pytest.mark.parametrize("name", [name for name in CONFIGS if name != "plain"])
    def test_each_config_changes_what_is_drawn(self, name):
        plain = dataclasses.replace(CONFIGS[name], repetition_penalty=1, repetition_window=0, min_tokens=0)
        tokens = []
        for config in (CONFIGS[name], plain):
            reference = Float64Sampler(config, [int(logits_of(1, i).argmax()) for i in range(3)], PROMPT)
            for i in range(40):
                reference.tokens.append(reference.draw(logits_of(1, i // 4 % 3))[0])
            tokens.append(reference.tokens)
        assert tokens[0] != tokens[1]


@FORMS
@PATHS
class TestHistory:
    def test_a_drawn_token_is_penalised_from_the_next_draw_on(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        session.join(1, 2, SamplingReqConfig(temperature=0.0, repetition_penalty=2.0))
        logits = certain(5, 8, 11)  # 10, 9, 8: each is half of itself once drawn
        assert [drawn(session, 1, logits, slot=slot) for _ in range(5)] == [5, 8, 11, 5, 5]
        assert session.history(2) == ([5, 8, 11], [])

    def test_a_ring_holds_the_last_tokens_of_its_window(self, in_graph, slot, on_host):
        spec = dataclasses.replace(SPEC, max_repetition_window=4)
        session = Session(in_graph, on_host=on_host, spec=spec)
        session.join(1, 2, SamplingReqConfig(temperature=0.0, repetition_penalty=1.0001, repetition_window=3))
        rings = []
        for token in (5, 6, 7, 8):
            drawn(session, 1, certain(token), slot=slot)
            rings.append(session.history(2)[1])
        assert rings == [[5, -1, -1, -1], [5, 6, -1, -1], [5, 6, 7, -1], [8, 6, 7, -1]]

    def test_a_token_is_penalised_once_per_time_in_the_window_and_not_for_the_prompt(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        config = SamplingReqConfig(temperature=0.0, repetition_penalty=1.1, repetition_window=3)
        session.join(1, 2, config)
        session.step([1], kept=frozenset(), prompts={1: torch.tensor([5] * 9)}, slot=slot)
        logits = certain(5, 8)  # 10 and 9: above it after one division by 1.1, below after two
        assert [drawn(session, 1, logits, slot=slot) for _ in range(7)] == [5, 5, 8, 5, 5, 5, 8]

    def test_prompt_ids_count_unless_the_request_says_no(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        config = SamplingReqConfig(temperature=0.0, repetition_penalty=2.0)
        session.join(1, 0, config)
        session.join(2, 1, dataclasses.replace(config, penalize_prompt=False))
        session.join(3, 2, dataclasses.replace(config, repetition_penalty=1))
        prompts = {rid: torch.tensor([5, 5, VOCAB + 3]) for rid in (1, 2, 3)}
        step = SamplerStep(prefill_tracked_tokens=prompts)
        got = session.run([1, 2, 3], feed(certain(5, 8))(session), step, slot=slot)
        assert got == [8, 5, 5]
        assert [session.history(row)[0] for row in (0, 1, 2)] == [[5, 8], [5], []]

    def test_ids_of_a_cached_prefix_count_with_those_of_the_first_step(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        config = SamplingReqConfig(temperature=0.0, repetition_penalty=2.0)
        for rid, penalizes in ((1, True), (2, False)):
            session.join(rid, rid, dataclasses.replace(config, penalize_prompt=penalizes))
            session.sampler.apply_cached_prefix(rid, rid, 2, np.array([5, 6]))
        session.sampler.apply_cached_prefix(3, 3, 0, None)
        step = SamplerStep(prefill_tracked_tokens={rid: torch.tensor([8]) for rid in (1, 2)})
        assert session.run([1, 2], feed(certain(5, 8, 11))(session), step, slot=slot) == [11, 5]
        assert [session.history(row)[0] for row in (1, 2)] == [[5, 6, 8, 11], [5]]

    def test_the_parts_of_a_prompt_count_beside_rows_that_keep_their_draw(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        session.join(1, 0, SEEN)
        session.join(2, 1, SEEN)
        for part in ([4, 9], [60]):
            session.step([2, 1], kept=frozenset({2}), prompts={1: torch.tensor(part)}, slot=slot)
        assert sorted(session.history(0)[0]) == [4, 9, 60]
        assert sorted(session.history(1)[0]) == sorted(set(session.tokens[2]))

    def test_dropped_and_padding_rows_leave_no_trace(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        session.join(1, 0, SEEN)
        session.join(2, 1, WINDOWED)
        session.step([1, 2], slot=slot)
        before = [session.state(row) for row in (0, 1)]
        session.step([1, 2], kept=frozenset(), padding=2, slot=slot)
        assert [session.state(row) for row in (0, 1)] == before

    @pytest.mark.parametrize("draws", [1, 6])  # more than the window holds
    def test_an_abandoned_step_leaves_no_trace(self, in_graph, slot, on_host, draws):
        session = Session(in_graph, on_host=on_host)
        session.join(1, 0, SEEN)
        session.join(2, 1, WINDOWED)
        for _ in range(5):
            session.step([1, 2], slot=slot)
        before = [session.state(row) for row in (0, 1)]
        ctx = session.context([1, 2], padding=1, slot=slot)
        session.sampler.plan(PLAIN, ctx)
        session.sampler.loopback_tokens()
        for _ in range(draws):
            session.forward(ctx)
        session.sampler.abandon(PLAIN, ctx)
        assert [session.state(row) for row in (0, 1)] == before

    def test_draws_of_one_step_see_each_other_as_draws_of_several_steps_do(self, in_graph, slot, on_host):
        tokens, states = [], []
        for config in (SEEN, WINDOWED, SHORT):
            for steps, draws in ((6, 1), (2, 3)):
                session = Session(in_graph, on_host=on_host)
                session.join(1, 0, config)
                forward = lambda ctx, session=session, draws=draws: [  # noqa: E731
                    session.sampler.sample(certain(*STOP_IDS, 5)[None] / 3).item() for _ in range(draws)
                ]
                tokens.append([token for _ in range(steps) for token in session.run([1], forward, slot=slot)])
                states.append(session.state(0))
        assert tokens[::2] == tokens[1::2]
        assert states[::2] == states[1::2]

    def test_a_reused_row_starts_clean_even_if_its_last_owner_left_in_between(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        for rid, config in ((1, SEEN), (2, WINDOWED), (3, SEEN), (4, WINDOWED)):
            session.join(rid, 0, config)
            session.step([rid], prompts={rid: torch.tensor(PROMPT)}, slot=slot)
            met, ring = session.history(0)
            assert set(met) == ({*PROMPT, *session.tokens[rid]} if config is SEEN else set())
            assert [token for token in ring if token >= 0] == ([] if config is SEEN else session.tokens[rid])
            session.sampler.apply_cached_prefix(rid, 0, 2, np.array([70, 71]))  # never planned again
            session.leave(rid)
        assert not session.sampler._history.is_used
        session.join(5, 0, SEEN)
        assert session.history(0) == ([], [])

    def test_stop_ids_cannot_come_before_the_least_length(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        session.join(1, 0, SamplingReqConfig(temperature=0.0, min_tokens=2))
        session.join(2, 1, SamplingReqConfig(temperature=1e-6, min_tokens=3))
        session.join(3, 2, SamplingReqConfig(temperature=0.0))
        forward = feed(certain(*STOP_IDS, 8))(session)
        got = [session.run([1, 2, 3], forward, slot=slot) for _ in range(4)]
        assert np.array(got).T.tolist() == [[8, 8, 3, 3], [8, 8, 8, 3], [3, 3, 3, 3]]

    def test_a_row_with_nothing_but_stop_ids_is_not_floored(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        session.join(1, 0, SHORT)
        only = torch.full((VOCAB,), -torch.inf)
        only[50] = 1.0
        forward = lambda ctx: (session.sampler.sample(only[None]).item(), session.sampler.faults().item())  # noqa: E731
        assert session.run([1], forward, slot=slot) == (50, 0)

    def test_new_settings_go_on_with_what_they_still_look_at(self, in_graph, slot, on_host):
        session = Session(in_graph, on_host=on_host)
        session.join(1, 0, SEEN)
        session.step([1], slot=slot)
        met = session.history(0)
        session.join(1, 0, dataclasses.replace(SEEN, repetition_penalty=1.1))
        assert session.history(0) == met
        session.join(1, 0, WINDOWED)
        assert session.history(0) == ([], [-1] * 16)
        session.step([1], slot=slot)
        session.join(1, 0, dataclasses.replace(WINDOWED, repetition_window=7))
        assert session.history(0) == ([], [-1] * 16)
        session.join(1, 0, SamplingReqConfig())
        assert session.history(0) == ([], [])
        assert session.offset_of(0) == 2


@FORMS
def test_a_step_without_penalties_ignores_them_and_still_counts_its_draws(on_host):
    session = Session(on_host=on_host)
    session.join(1, 0, SamplingReqConfig(temperature=0.0, repetition_penalty=4.0))
    plain = SamplerStep(apply_penalty=False)
    logits = certain(5, 8)
    assert [drawn(session, 1, logits, step) for step in (plain, plain, PLAIN, PLAIN)] == [5, 5, 8, 5]
    assert session.history(0)[0] == [5, 8]


def test_a_preplan_takes_no_prompt_ids():
    session = Session()
    session.join(1, 0, SEEN)
    step, ctx = SamplerStep(prefill_tracked_tokens={1: torch.tensor([5])}), session.context([1], slot=0)
    session.sampler.plan(step, dataclasses.replace(ctx, is_preplan=True))
    assert session.history(0)[0] == []
    session.sampler.promote_preplan(step, ctx)
    session.sampler.commit(step, ctx)
    assert session.history(0)[0] == [5]


def test_a_request_that_needs_no_memory_holds_none():
    session = Session()
    for rid, config in ((1, SamplingReqConfig(repetition_window=9)), (2, SHORT), (3, WINDOWED), (4, SEEN)):
        session.join(rid, rid, config)
    history = session.sampler._history
    assert np.flatnonzero(history.seen.address).tolist() == [4]
    assert np.flatnonzero(history.ring.address).tolist() == [3]
    session.leave(3)
    session.leave(4)
    assert not history.seen.address.any()
    assert not history.ring.address.any()
    session.join(5, 6, SEEN)
    session.join(6, 7, WINDOWED)
    assert (history.seen.address[6], history.ring.address[7]) == (1, 1), "places are used again"


def test_a_batch_of_which_no_row_looks_back_pays_nothing():
    session = Session()
    session.join(1, 0, SEEN)
    session.join(2, 1)
    ctx = session.context([2], padding=1, slot=0)
    session.sampler.plan(PLAIN, ctx)
    assert session.sampler._planned.history is None
    session.sampler.abandon(PLAIN, ctx)


def test_what_a_batch_looks_back_at_is_collected_once_while_nothing_changes():
    session = Session()
    session.join(1, 0, SEEN)
    ctx = session.context([1], slot=0)

    def planned():
        session.sampler.plan(PLAIN, ctx)
        return session.sampler._planned.history

    first = planned()
    assert planned() is first
    session.join(3, 2, WINDOWED)
    assert planned() is not first


@FORMS
def test_the_width_of_the_logits_may_be_known_from_the_first_draw_only(on_host):
    session = Session(spec=dataclasses.replace(SPEC, vocab_size=None), on_host=on_host)
    session.join(1, 0, SamplingReqConfig(temperature=0.0, repetition_penalty=2.0))
    step = SamplerStep(prefill_tracked_tokens={1: torch.tensor([5])})
    assert drawn(session, 1, certain(5, 8), step) == 8
    assert session.history(0)[0] == [5, 8]
    with pytest.raises(ValueError, match=r"vocab_size must be given .* captured"):
        session.sampler.plan(PLAIN, session.context([1], slot=0, capture=True))


def test_logits_of_another_width_than_the_specs_are_refused():
    session = Session()
    session.join(1, 0, SEEN)
    with pytest.raises(ValueError, match=f"vocab_size must be the width of the logits, {VOCAB + 1}, got {VOCAB}"):
        session.run([1], lambda ctx: session.sampler.sample(torch.zeros(1, VOCAB + 1)))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), in_graph=st.booleans(), on_host=st.booleans())
def test_over_random_arrivals_histories_are_those_of_the_kept_tokens(data, in_graph, on_host):
    session, configs, next_rid = Session(in_graph, on_host=on_host), {}, 1
    for number in range(data.draw(st.integers(5, 25))):
        if configs and data.draw(st.integers(0, 3)) == 0:
            rid = data.draw(st.sampled_from(sorted(configs)))
            session.leave(rid)
            del configs[rid]
        if len(configs) < 4:
            row = min(set(range(8)) - {session.row_of[rid] for rid in configs})
            configs[next_rid] = data.draw(st.sampled_from([SEEN, WINDOWED, SHORT, CONFIGS["plain"]]))
            session.join(next_rid, row, configs[next_rid])
            next_rid += 1
        rids = data.draw(st.lists(st.sampled_from(sorted(configs)), min_size=1, unique=True))
        kept = data.draw(st.none() | st.frozensets(st.sampled_from(rids)))
        session.step(rids, kept=kept, padding=number % 3, slot=(None, 0, 1)[number % 3])
        for rid, config in configs.items():
            met, ring = session.history(session.row_of[rid])
            tokens = session.tokens[rid]
            assert met == (sorted(set(tokens)) if config is SEEN else [])
            assert sorted(token for token in ring if token >= 0) == (sorted(tokens[-4:]) if config is WINDOWED else [])
