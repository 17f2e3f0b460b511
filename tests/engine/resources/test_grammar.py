"""Grammars across steps: which tokens a row may draw, when it is complete, and that no row touches another."""

import json

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo, RowVerdict
from mstar.engine.resources.grammar.config import GrammarReqConfig, GrammarSpec, GrammarStep
from mstar.engine.resources.grammar.masks import SlotMasks, bar_rows, bar_runs, bits_of, runs_of
from mstar.engine.resources.runner import build_resources
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext
from tests.engine.resources.grammars import EOS, IM_END, PIECES, VOCAB, VOCABULARY, byte_id, word_id

CAPACITY = 8
INFO = EngineResourceInfo(torch.device("cpu"), torch.float32, torch.float32, CAPACITY, CAPACITY, num_slots=2)
STEP = GrammarStep()
A, B, C, X = map(byte_id, "abcx")
A_IDS = {A, len(PIECES) - 2}  # two ids of one text


class Session:
    """Grammars alone.  Requests are master rows 0 .. 7, padding rows 8 .. 15."""

    def __init__(self):
        spec = GrammarSpec("grammar", {"LLM"}, VOCAB, lambda: VOCABULARY)
        self.grammars = build_resources([spec], INFO)["grammar"]
        self.grammars.build_accelerator_graph_buffers([], CAPACITY, CAPACITY)
        self.row_of = {-2 - i: CAPACITY + i for i in range(CAPACITY)}
        for rid, row in self.row_of.items():
            self.grammars.ingest_request(rid, row, None)

    def join(self, rid, row, kind=None, text="", **fields):
        self.row_of[rid] = row
        self.grammars.ingest_request(rid, row, GrammarReqConfig(kind, text, **fields))

    def leave(self, rid):
        self.grammars.remove_request(rid, self.row_of.pop(rid))

    def context(self, rids, padding=0, slot=None):
        padded = (*rids, *(-2 - i for i in range(padding)))
        lease = None if slot is None else SlotLease(slot, BucketKey("decode", len(padded), len(padded)))
        rows = np.array([self.row_of[rid] for rid in padded], np.int64)
        return StepContext(
            "decode", tuple(rids), rows, np.ones(len(padded), np.int64), padded, slot or 0, slot_lease=lease
        )

    def barred(self, rids, **context):
        """The logits of a step that were 1 before it."""
        ctx = self.context(rids, **context)
        self.grammars.plan(STEP, ctx)
        logits = self.grammars.apply(torch.ones(len(ctx.rows), VOCAB))
        self.grammars.commit(STEP, ctx)
        return logits

    def allowed(self, rid):
        return set(torch.isfinite(self.barred([rid])[0]).nonzero().flatten().tolist())

    def accept(self, *pairs):
        """Verdicts on tokens by request; None where no row is under a grammar."""
        rows = np.array([self.row_of[rid] for rid, _ in pairs], np.int64)
        found = self.grammars.accept_tokens(rows, np.array([token for _, token in pairs], np.int64))
        return None if found is None else [RowVerdict(verdict) for verdict in found]


GO_ON, COMPLETE, BROKEN = RowVerdict.GO_ON, RowVerdict.COMPLETE, RowVerdict.BROKEN


@pytest.fixture
def session():
    return Session()


def test_a_row_draws_what_its_grammar_allows_until_only_an_end_could_follow(session):
    session.join(1, 0, "regex", "abc?")
    assert session.allowed(1) == {*A_IDS, word_id("ab"), word_id("abc")}
    assert session.accept((1, A)) == [GO_ON]
    assert session.allowed(1) == {B}
    assert session.accept((1, B)) == [GO_ON]
    assert session.allowed(1) == {C, EOS}
    assert session.accept((1, C)) == [COMPLETE]


def test_a_text_that_may_end_may_end_by_eos_and_by_the_requests_stop_ids(session):
    session.join(1, 0, "regex", "ab?", stop_ids=(IM_END, VOCAB + 5))
    assert not session.allowed(1) & {EOS, IM_END}
    session.accept((1, A))
    assert session.allowed(1) == {B, EOS, IM_END}


def test_with_ignore_eos_only_stop_ids_end_a_text_early(session):
    session.join(1, 0, "regex", "ab?", ignore_eos=True)
    session.join(2, 1, "regex", "ab?", ignore_eos=True, stop_ids=(IM_END,))
    assert session.accept((1, A), (2, A)) == [GO_ON, GO_ON]
    assert session.allowed(1) == {B}
    assert session.allowed(2) == {B, IM_END}
    assert session.accept((1, B), (2, B)) == [COMPLETE, COMPLETE]


def test_a_stop_id_that_is_text_of_the_grammar_ends_it_and_is_never_drawn_as_text(session):
    session.join(1, 0, "regex", "abc|a", stop_ids=(B, word_id("abc")))
    assert session.allowed(1) == {*A_IDS, word_id("ab")}
    session.accept((1, A))
    assert session.allowed(1) == {B, word_id("abc"), EOS}  # ends: the text a is whole
    session.join(2, 1, "regex", "abc", stop_ids=(B,))
    session.accept((2, A))
    assert session.allowed(2) == set()  # nothing is left: the sampler ends the row with its fault


def test_plain_rows_beside_two_grammars_keep_every_bit_of_their_logits(session):
    session.join(1, 0)
    session.join(2, 1, "regex", "a+")
    session.join(3, 2)
    session.join(4, 3, "choice", json.dumps(["x", "b"]))
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 0], logits[2, 1] = float("nan"), float("inf")
    before = logits.clone()
    for slot in (None, 0, 1):
        ctx = session.context([1, 2, 3, 4], padding=2, slot=slot)
        session.grammars.plan(STEP, ctx)
        given = before.clone()
        after = session.grammars.apply(given)
        session.grammars.commit(STEP, ctx)
        assert after is given  # in place
        for place in (0, 2, 4, 5):
            assert torch.equal(after[place].view(torch.int32), before[place].view(torch.int32))
        for place, ids in ((1, {*A_IDS, word_id("aa")}), (3, {X, B})):
            assert set(torch.isfinite(after[place]).nonzero().flatten().tolist()) == ids
            kept = sorted(ids)
            assert torch.equal(after[place, kept], before[place, kept])


def test_a_broken_row_disturbs_no_other(session, caplog):
    for rid in range(4):
        session.join(rid, rid, "regex", "a+x")
    assert session.accept((0, A), (1, B), (2, A), (3, A)) == [GO_ON, BROKEN, GO_ON, GO_ON]
    assert "request 1 " in caplog.text
    assert "satisfy" in caplog.text
    assert [session.grammars.reason_of(row) for row in range(CAPACITY)] == [""] * CAPACITY  # no request is to blame
    assert session.allowed(2) == {*A_IDS, word_id("aa"), X}
    assert session.accept((0, X), (2, A), (3, X)) == [COMPLETE, GO_ON, COMPLETE]
    assert session.accept((2, EOS)) == [BROKEN]  # no end is text of a grammar
    assert session.grammars.counters == {"accepted": 8, "broken": 2, "renewed": 0}


def test_rows_outlive_the_lexer_that_their_guide_has_used_up(session, monkeypatch):
    """Texts of one guide share a lexer, which holds a limited number of states."""
    limits = LLParserLimits(max_lexer_states=1500, verbose_errors=False)
    monkeypatch.setattr("mstar.engine.resources.grammar.compiled.LIMITS", limits)
    rng, guide = np.random.default_rng(0), r"(?s:.*)a(?s:.){14}"
    for rid in range(CAPACITY):
        session.join(rid, rid, "regex", guide)
    for _ in range(70):
        pairs = [(rid, int(rng.choice([A, B]))) for rid in range(CAPACITY)]
        assert session.accept(*pairs) == [GO_ON] * CAPACITY
        assert {A, B} <= session.allowed(0)
    assert session.grammars.counters["renewed"] > 0
    monkeypatch.setattr("mstar.engine.resources.grammar.compiled.LIMITS", LLParserLimits(max_lexer_states=60))
    session.join(9, 0, "regex", "[ab]{30}c[xy]{200}")  # one text alone needs more: its row breaks
    verdicts = [session.accept((9, token)) for token in [A] * 30 + [C] + [X] * 100]
    assert [BROKEN] in verdicts
    reason = session.grammars.reason_of(0)
    assert reason.startswith(
        "guided_decoding_guide: a grammar within the engine's limits, got '[ab]{30}c[xy]{200}': too many"
    )


def test_tokens_of_rows_without_a_grammar_pass(session):
    session.join(1, 0)
    session.join(2, 1)
    assert session.accept((1, 5), (2, 6)) is None
    session.join(3, 2, "regex", "a")
    assert session.accept((1, 5), (2, 6)) is None
    assert session.accept((1, 5), (3, A), (2, 6)) == [GO_ON, COMPLETE, GO_ON]


def test_a_batch_without_a_grammar_is_left_alone(session):
    session.join(1, 0)
    logits = torch.ones(1, VOCAB)
    logits.requires_grad_()  # any write in place would raise
    session.grammars.plan(STEP, session.context([1]))
    assert session.grammars.apply(logits) is logits
    session.join(2, 1, "regex", "a")
    session.grammars.plan(STEP, session.context([1]))
    assert session.grammars.apply(logits) is logits


def test_steps_whose_token_is_not_kept_do_not_move_a_grammar(session):
    session.join(1, 0, "regex", "ab")
    first = session.allowed(1)
    assert session.allowed(1) == first  # a chunk of the prompt that was not the last
    ctx = session.context([1])
    session.grammars.plan(STEP, ctx)
    session.grammars.abandon(STEP, ctx)
    assert session.allowed(1) == first
    assert session.accept((1, A)) == [GO_ON]
    assert session.allowed(1) == {B}


def test_a_plan_holds_what_was_allowed_when_it_was_made(session):
    session.join(1, 0, "regex", "ab")
    session.join(2, 1, "regex", "ab")
    session.grammars.plan(STEP, session.context([1]))
    session.accept((2, A))
    session.leave(2)
    session.leave(1)
    session.join(3, 0, "regex", "c")
    logits = session.grammars.apply(torch.ones(1, VOCAB))
    assert set(torch.isfinite(logits[0]).nonzero().flatten().tolist()) == {*A_IDS, word_id("ab")}


def test_a_row_starts_anew_for_its_next_request_and_not_when_ingested_again(session):
    session.join(1, 0, "regex", "ab")
    session.accept((1, A))
    session.join(1, 0, "regex", "ab")
    assert session.allowed(1) == {B}
    session.leave(1)
    session.grammars.remove_request(1, 0)  # again: no error
    session.join(2, 0, "regex", "ab")
    assert session.allowed(2) == {*A_IDS, word_id("ab")}
    session.leave(2)
    session.join(3, 0)
    assert session.accept((3, X)) is None
    assert torch.isfinite(session.barred([3])).all()


def test_membership_may_change_while_the_rows_array_stays(session):
    session.join(1, 0)
    session.join(2, 1, "regex", "a")
    ctx = session.context([1, 2], slot=0)
    for text, ids in ((None, None), ("b", {B})):
        if text:
            session.leave(1)
            session.join(1, 0, "regex", text)
        session.grammars.plan(STEP, ctx)
        logits = session.grammars.apply(torch.ones(2, VOCAB))
        assert set(torch.isfinite(logits[0]).nonzero().flatten().tolist()) == (ids or set(range(VOCAB)))


@pytest.mark.parametrize(("kind", "text"), [("regex", "("), ("choice", "[]"), ("json_schema", "{"), ("xml", "")])
def test_a_bad_guide_is_refused_in_preparation_and_leaves_nothing_at_ingest(session, kind, text):
    with pytest.raises(ValueError, match=r"^guided_decoding_guide"):
        session.grammars.prepare_request(GrammarReqConfig(kind, text))
    with pytest.raises(ValueError, match=r"^guided_decoding_guide"):
        session.join(1, 0, kind, text)
    session.grammars.remove_request(1, 0)
    assert torch.isfinite(session.barred([1])).all()


def test_preparation_leaves_ingest_nothing_to_compile(session, monkeypatch):
    session.grammars.prepare_request(GrammarReqConfig("regex", "ab"))
    session.grammars.prepare_request(GrammarReqConfig())
    monkeypatch.setattr("mstar.engine.resources.grammar.compiled.LLMatcher", None)
    session.join(1, 0, "regex", "ab")
    assert session.allowed(1) == {*A_IDS, word_id("ab")}


def test_texts_of_many_rows_with_their_own_grammars_parse(session):
    schema = {"type": "object", "properties": {"a": {"enum": [1, True]}, "b": {"maxLength": 3, "type": "string"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    for rid in range(CAPACITY):
        kind, text = [("json_schema", json.dumps(schema)), ("choice", '["abc", "b"]')][rid % 2]
        session.join(rid, rid, kind, text)
    rng, texts, running = np.random.default_rng(3), dict.fromkeys(range(CAPACITY), b""), list(range(CAPACITY))
    for _ in range(300):
        rows = torch.isfinite(session.barred(running)).numpy()
        drawn = [int(rng.choice(np.flatnonzero(row))) for row in rows]
        ended = {rid for rid, token in zip(running, drawn, strict=True) if token == EOS}
        pairs = [(rid, token) for rid, token in zip(running, drawn, strict=True) if rid not in ended]
        for rid, token in pairs:
            texts[rid] += PIECES[token]
        verdicts = session.accept(*pairs) if pairs else []
        assert BROKEN not in verdicts
        over = ended | {rid for (rid, _), verdict in zip(pairs, verdicts, strict=True) if verdict is COMPLETE}
        running = [rid for rid in running if rid not in over]
        if not running:
            break
    assert not running
    for rid, text in texts.items():
        if rid % 2:
            assert text in (b"abc", b"b")
        else:
            assert set(json.loads(text)) == {"a", "b"}


@pytest.mark.parametrize(
    ("stop_ids", "tokens"),
    [((), [A, B, B]), pytest.param((B,), [A, EOS], id="nothing but ends is left")],
)
def test_min_tokens_holds_an_end_back_while_the_grammar_allows_more(session, stop_ids, tokens):
    spec = SamplerSpec("sampler", {"LLM"}, VOCAB, min_tokens_stop_ids=(EOS, *stop_ids))
    sampler = build_resources([spec], INFO)["sampler"]
    sampler.ingest_request(1, 0, SamplingReqConfig(temperature=0, min_tokens=3))
    session.join(1, 0, "regex", "ab*", stop_ids=stop_ids)
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, A], logits[0, B] = 3.0, 2.0, 1.0
    for token in tokens:
        ctx = session.context([1])
        session.grammars.plan(STEP, ctx)
        sampler.plan(SamplerStep(), ctx)
        assert sampler.sample(session.grammars.apply(logits.clone())).tolist() == [token]
        sampler.commit(SamplerStep(), ctx)
        if token != EOS:
            session.accept((1, token))


def test_a_captured_forward_shows_one_entry_whoever_is_live(session):
    session.join(1, 0)
    session.join(2, 1, "regex", "a")
    traces = []
    for rids in ([1], [2]):
        session.grammars.plan(STEP, session.context(rids, slot=0))
        traces.append(strict_mode.record(lambda: session.grammars.apply(torch.ones(1, VOCAB)))[1])
    strict_mode.compare(traces[0][-1:], traces[1][-1:])
    assert traces[0][-1].name == "opaque::grammar"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [31, 32, 33, 64, 1000])
def test_both_ways_of_barring_agree(vocab, dtype):
    rng = np.random.default_rng(vocab)
    ids = [sorted(set(rng.integers(0, vocab, 5).tolist())) for _ in range(3)]
    words = np.stack([bits_of([*each, vocab + 3], vocab) for each in ids])
    by_runs, by_rows = torch.ones(5, vocab, dtype=dtype), torch.ones(5, vocab, dtype=dtype)
    places = np.array([0, 1, 4])
    bar_runs(by_runs, words, runs_of(places))
    bar_rows(by_rows, torch.from_numpy(words), torch.tensor([0, 1, -1, -1, 2], dtype=torch.int32))
    assert torch.equal(by_runs, by_rows)
    assert [torch.isfinite(by_runs[i]).nonzero().flatten().tolist() for i in places] == ids


def test_a_slots_masks_stay_at_one_address_and_rows_without_a_grammar_have_none():
    masks = SlotMasks(2, torch.device("cpu"), num_slots=2)
    masks.reserve(4)
    lease, other = (SlotLease(slot, BucketKey("decode", 4, 4)) for slot in (0, 1))
    none, some = np.zeros((0, 2), np.int32), np.array([[5, 6], [7, 8]], np.int32)
    nobody, two = np.array([], np.int64), np.array([1, 3])
    assert masks.put(none, nobody, 4, lease)[1].tolist() == [-1] * 4
    words, mask_of = masks.put(some, two, 4, lease)
    assert (words.shape, words[:2].tolist(), mask_of.tolist()) == ((4, 2), some.tolist(), [-1, 0, -1, 1])
    for bs in (3, 4):
        again = masks.put(some[:1] + 1, two[:1], bs, lease)
        assert [each.data_ptr() for each in again] == [words.data_ptr(), mask_of.data_ptr()]
        assert (again[0][0].tolist(), again[1].tolist()) == ([6, 7], [-1, 0, -1, -1][:bs])
    assert masks.put(none, nobody, 4, lease)[1].tolist() == [-1] * 4
    assert masks.put(none, nobody, 3, other)[1].tolist() == [-1] * 3
    words, mask_of = masks.put(some, two, 4, None)
    assert (words.tolist(), mask_of.tolist()) == (some.tolist(), [-1, 0, -1, 1])


def test_runs_are_stretches_of_neighbours():
    assert runs_of(np.array([], np.int64)) == []
    assert runs_of(np.array([0, 1, 2, 5, 7, 8])) == [(0, 3, 0), (5, 6, 3), (7, 9, 4)]


def test_a_vocabulary_wider_than_the_logits_is_refused():
    spec = GrammarSpec("grammar", {"LLM"}, 100, lambda: VOCABULARY)
    grammars = build_resources([spec], INFO)["grammar"]
    with pytest.raises(ValueError, match="more than the 100 logits"):
        grammars.prepare_request(GrammarReqConfig("json"))
