"""Edits of logits across steps: what a request asked for happens to its own row, and to no other."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig, LogitEditsSpec, LogitEditsStep
from mstar.engine.resources.logit_edits.manager import LogitEdits
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext

VOCAB, CAPACITY = 13, 8
SLOTS = pytest.mark.parametrize("slot", [pytest.param(None, id="eager"), pytest.param(0, id="leased")])


def device_edits(spec, info):
    from mstar.engine.resources.logit_edits.device import DeviceLogitEdits

    return DeviceLogitEdits(spec, info)


@pytest.fixture(params=["arrays", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def make(request):
    """Sessions on the CPU, of its own operations and of the kernels in Triton's interpreter, and on a GPU."""
    if request.param == "arrays":
        return Session
    pytest.importorskip("triton")
    if torch.cuda.is_available() != (request.param == "cuda"):
        pytest.skip("kernels run on a GPU, or else in Triton's interpreter")
    device = "cuda" if request.param == "cuda" else "cpu"
    return lambda **options: Session(device=device, uses_kernels=True, **options)


def config(allowed=(), words=(), stops=(), min_tokens=0, bias=None, presence=0.0, frequency=0.0):
    bias = bias or {}
    return LogitEditsReqConfig(
        allowed_ids=np.array(allowed, np.int64),
        bad_words=tuple(map(tuple, words)),
        stop_ids=np.array(stops, np.int64),
        min_tokens=min_tokens,
        bias_ids=np.array(list(bias), np.int64),
        bias=np.array(list(bias.values()), np.float32),
        presence_penalty=presence,
        frequency_penalty=frequency,
    )


def expected(logits, config, generated):
    """What the edits make of one row of logits after ``generated`` tokens, in float64, word for word from the rules."""
    x = logits.astype(np.float64)
    if config is None:
        return x
    if config.allowed_ids.size:
        x[[i for i in range(x.size) if i not in config.allowed_ids]] = -np.inf
    for word in config.bad_words:
        *before, last = word
        if not before or generated[-len(before) :] == before:
            x[last] = -np.inf
    for token, bias in zip(config.bias_ids, config.bias, strict=True):
        x[token] += bias
    for token, count in Counter(generated).items():
        x[token] -= config.presence_penalty + config.frequency_penalty * count
    if len(generated) < config.min_tokens and np.isfinite(np.delete(x, config.stop_ids)).any():
        x[config.stop_ids] = -np.inf
    return x


def logits_of(rid, number, vocab=VOCAB):
    return np.random.default_rng([rid, number]).normal(0, 3, vocab).astype(np.float32)


class Session:
    """The resource alone.  Requests are master rows 0 .. 7, padding rows 8 .. 15; every draw is what the test says."""

    def __init__(self, vocab=VOCAB, device="cpu", uses_kernels=False):
        info = EngineResourceInfo(torch.device(device), torch.float32, torch.float32, CAPACITY, CAPACITY, num_slots=2)
        self.vocab, self.device, self.uses_kernels = vocab, device, uses_kernels
        spec = LogitEditsSpec("logit_edits", {"LLM"}, vocab)
        self.edits = device_edits(spec, info) if uses_kernels else LogitEdits.build(spec, info)
        self.edits.build_accelerator_graph_buffers([], CAPACITY, CAPACITY)
        self.row_of = {-2 - i: CAPACITY + i for i in range(CAPACITY)}
        for rid, row in self.row_of.items():
            self.edits.ingest_request(rid, row, None)
        self.configs, self.generated = {}, {}

    def join(self, rid, row, config=None):
        self.row_of[rid] = row
        self.edits.ingest_request(rid, row, config)
        self.configs[rid] = config
        self.generated.setdefault(rid, [])

    def leave(self, rid):
        self.edits.remove_request(rid, self.row_of.pop(rid))
        del self.configs[rid], self.generated[rid]

    def context(self, rids, padding=0, slot=None):
        padded = (*rids, *(-2 - i for i in range(padding)))
        lease = None if slot is None else SlotLease(slot, BucketKey("decode", len(padded), len(padded)))
        rows = np.array([self.row_of[rid] for rid in padded], np.int64)
        return StepContext(
            "decode", tuple(rids), rows, np.ones(rows.size, np.int64), padded, slot or 0, slot_lease=lease
        )

    def raw(self, ctx):
        rows = [logits_of(abs(rid), len(self.generated.get(rid, ())), self.vocab) for rid in ctx.padded_request_ids]
        return np.stack(rows)

    def plan(self, ctx, kept=None):
        step = LogitEditsStep(kept_rids=kept)
        self.edits.plan(step, ctx)
        return step

    def edited(self, logits):
        return self.edits.hold_back(self.edits.apply(logits))

    def step(self, tokens, kept=None, **context):
        """One step in which request ``rid`` draws ``tokens[rid]``; checks every row of the logits, returns them."""
        ctx = self.context(list(tokens), **context)
        step = self.plan(ctx, kept)
        raw = self.raw(ctx)
        edited = self.edited(torch.from_numpy(raw.copy()).to(self.device)).cpu().numpy()
        for rid, before, after in zip(ctx.padded_request_ids, raw, edited, strict=True):
            wanted = expected(before, self.configs.get(rid), self.generated.get(rid, []))
            np.testing.assert_allclose(after, wanted, rtol=1e-6, atol=1e-6, err_msg=f"request {rid}")
        drawn = [*tokens.values(), *([self.vocab - 1] * (len(edited) - len(tokens)))]
        self.edits.record(torch.tensor(drawn, device=self.device))
        self.edits.commit(step, ctx)
        for rid, token in tokens.items():
            if kept is None or rid in kept:
                self.generated[rid].append(token)
        return dict(zip(ctx.padded_request_ids, edited, strict=True))


def barred(row):
    return np.flatnonzero(np.isneginf(row)).tolist()


CASES = {
    "a few allowed": config(allowed=[3, 1, 3]),
    "nearly all allowed": config(allowed=range(1, VOCAB)),
    "one-token words": config(words=[[2], [5]]),
    "a word of two": config(words=[[1, 2]]),
    "words of several, some of one tail": config(words=[[1, 2, 3], [2, 3], [4, 3], [1, 1, 1]]),
    "a word that repeats itself": config(words=[[2, 2]]),
    "min tokens": config(stops=[0, 7], min_tokens=3),
    "min tokens without stop ids": config(min_tokens=3),
    "min tokens of one that may draw nothing but stop ids": config(allowed=[0, 7], stops=[0, 7, 9], min_tokens=3),
    "min tokens of one that may draw one token besides": config(allowed=[7, 12], stops=[0, 7, 9], min_tokens=3),
    "bias": config(bias={0: 2.5, 12: -100.0, 3: 100.0}),
    "presence": config(presence=1.5),
    "frequency": config(frequency=-0.75),
    "both penalties": config(presence=-2.0, frequency=2.0),
    "everything": config(
        allowed=[0, 1, 2, 3], words=[[1, 2], [0]], stops=[3], min_tokens=2, bias={1: 4.0}, presence=1.0, frequency=0.5
    ),
}


@pytest.mark.parametrize("slot", [None, 0])
@pytest.mark.parametrize("name", CASES)
def test_each_edit_does_what_it_says(make, name, slot):
    session = make()
    session.join(1, 3, CASES[name])
    for token in (1, 2, 2, 1, 2, 3, 1, 1, 1, 4):
        session.step({1: token}, slot=slot, padding=1)


def test_a_bad_word_is_barred_only_where_it_would_be_completed(make):
    session = make()
    session.join(1, 0, config(words=[[1, 2, 3], [9]]))
    seen = [barred(session.step({1: token})[1]) for token in (2, 1, 2, 3, 1, 2, 0)]
    assert seen == [[9], [9], [9], [3, 9], [9], [9], [3, 9]]


def test_a_token_barred_by_one_edit_is_not_brought_back_by_another(make):
    session = make()
    session.join(1, 0, config(allowed=[1, 2], words=[[2]], bias={2: 100.0, 5: 100.0}, frequency=-2.0))
    for _ in range(3):
        assert barred(session.step({1: 2})[1]) == [i for i in range(VOCAB) if i != 1]


def test_nothing_left_is_a_row_of_minus_infinity_and_no_nan(make):
    session = make()
    session.join(1, 0, config(allowed=[4], words=[[4]], bias={4: 100.0}, presence=2.0))
    for _ in range(2):
        assert barred(session.step({1: 4})[1]) == list(range(VOCAB))


@SLOTS
def test_penalties_count_generated_tokens_however_many(slot):
    session = Session(vocab=200)
    session.join(1, 0, config(presence=0.5, frequency=0.25))
    session.join(2, 1, config(frequency=1.0))
    rng = np.random.default_rng(0)
    for token in rng.integers(0, 200, 170).tolist():  # more distinct ones than there is room for at first
        session.step({1: token, 2: 7}, slot=slot)
    assert len(set(session.generated[1])) > 100


def test_a_vocabulary_generated_whole_has_room():
    session = Session(vocab=70)
    session.join(1, 0, config(presence=0.5))
    for token in [*range(70), *range(70), 3]:
        session.step({1: token})


@SLOTS
def test_a_dropped_draw_counts_for_nothing(make, slot):
    session = make()
    everything = config(words=[[1, 2]], stops=[0], min_tokens=2, presence=1.0)
    session.join(1, 0, everything)
    session.join(2, 1, everything)
    session.step({1: 1, 2: 1}, kept=frozenset({2}), slot=slot)
    edited = session.step({1: 1, 2: 2}, kept=frozenset(), slot=slot)
    assert 2 not in barred(edited[1])
    assert 2 in barred(edited[2])
    session.step({1: 1, 2: 2}, slot=slot)
    assert (session.generated[1], session.generated[2]) == ([1], [1, 2])
    session.step({1: 1, 2: 2}, slot=slot)


@SLOTS
def test_rows_without_edits_and_padding_rows_keep_their_bits(slot):
    session = Session()
    session.join(1, 0)
    session.join(2, 1, CASES["everything"])
    session.join(3, 2, config())
    ctx = session.context([1, 2, 3], padding=2, slot=slot)
    session.plan(ctx)
    raw = session.raw(ctx)
    raw[0, :3] = np.nan, -0.0, np.inf
    edited = session.edited(torch.from_numpy(raw.copy())).numpy()
    for place in (0, 2, 3, 4):
        assert edited[place].tobytes() == raw[place].tobytes()
    assert edited[1].tobytes() != raw[1].tobytes()


def test_edits_are_in_place_where_the_logits_allow_it():
    session = Session()
    session.join(1, 0, config(words=[[3]]))
    ctx = session.context([1])
    session.plan(ctx)
    logits = torch.zeros(1, VOCAB)
    assert session.edits.apply(logits) is logits
    assert barred(logits[0].numpy()) == [3]


@SLOTS
@pytest.mark.parametrize("edits", [None, config(words=[[3]])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device_the_logits_stay_as_they_are(make, slot, edits, dtype):
    session = make()
    if not session.uses_kernels:
        pytest.skip("on the CPU edits are in place")
    session.join(1, 0, edits)
    session.plan(session.context([1], padding=1, slot=slot))
    logits = torch.zeros(2, 2 * VOCAB, dtype=dtype, device=session.device)[:, ::2]
    edited = session.edited(logits)
    assert (edited.dtype, edited.is_contiguous()) == (torch.float32, True)
    assert barred(edited[0].cpu().numpy()) == ([] if edits is None else [3])
    edited.fill_(1)
    assert not logits.any()


@pytest.mark.parametrize(
    "logits",
    [torch.ones(1, VOCAB, dtype=torch.bfloat16), torch.ones(1, 2 * VOCAB)[:, ::2]],
    ids=["bfloat16", "strided"],
)
def test_other_logits_become_contiguous_float32(logits):
    session = Session()
    session.join(1, 0, config(words=[[3]]))
    session.plan(session.context([1]))
    edited = session.edited(logits)
    assert edited.dtype == torch.float32
    assert edited.is_contiguous()
    assert barred(edited[0].numpy()) == [3]


def test_a_step_beside_which_nobody_edits_does_no_work_on_the_logits():
    session = Session()
    session.join(1, 0)
    session.join(2, 1, config(words=[[3]]))
    ctx = session.context([1], padding=1)
    session.plan(ctx)
    logits = torch.zeros(2, VOCAB)
    _, trace = strict_mode.record(lambda: session.edited(logits))
    assert [op.name for op in trace] == ["opaque::logit_edits", "opaque::stop_floor"]
    assert logits._version == 0


@SLOTS
def test_a_batch_is_laid_out_once_while_it_stays_as_it_is(slot, monkeypatch):
    session = Session()
    session.join(1, 0, CASES["everything"])
    session.join(2, 1)
    laid_out = []
    original = session.edits._laid_out
    monkeypatch.setattr(session.edits, "_laid_out", lambda *args: laid_out.append(1) or original(*args))
    for _ in range(4):
        session.step({1: 1, 2: 1}, slot=slot)
        session.step({1: 2}, slot=slot)  # compositions take turns
    assert len(laid_out) == 2
    session.join(2, 1, config(words=[[3]]))
    session.step({1: 1, 2: 1}, slot=slot)
    assert len(laid_out) == 3


@pytest.mark.parametrize("seed", [0, 1])
def test_batches_of_any_composition_edit_as_each_row_asked(make, seed):
    session, rng, number = make(), np.random.default_rng(seed), 0
    for _ in range(40):
        for row in rng.choice(CAPACITY, 2, replace=False).tolist():
            here = [rid for rid, own in session.row_of.items() if own == row]
            if here:
                session.leave(here[0])
            else:
                number += 1
                session.join(number, row, CASES[rng.choice(list(CASES))] if rng.random() < 0.8 else None)
        rids = [rid for rid in session.configs if rng.random() < 0.7]
        if rids:
            kept = None if rng.random() < 0.5 else frozenset(rid for rid in rids if rng.random() < 0.7)
            tokens = {rid: int(rng.integers(0, 4)) for rid in rids}
            padding = int(rng.integers(0, CAPACITY - len(rids) + 1))
            session.step(tokens, kept, padding=padding, slot=[None, 0, 1][rng.integers(3)])


@SLOTS
def test_a_reused_row_starts_over(make, slot):
    session = make()
    history = config(words=[[1, 2]], stops=[0], min_tokens=3, frequency=1.0)
    for rid in (1, 2, 3):
        session.join(rid, 5, history)
        for token in (1, 1, 1, 1):
            session.step({rid: token}, slot=slot)
        session.leave(rid)
    session.join(4, 5)
    session.step({4: 1}, slot=slot)


def test_a_departure_frees_its_slots():
    session = Session()
    for rid in range(1, 40):
        session.join(rid, rid % CAPACITY, config(words=[[1, 2]], presence=1.0))
        session.step({rid: 1})
        session.leave(rid)
    assert session.edits._counts.counts.shape[0] <= 4
    assert session.edits._recent.tokens.shape[0] <= 4
    assert not session.edits._edits
    session.edits.remove_request(99, 0)


def test_ingest_again_takes_new_edits_and_keeps_what_was_generated(make):
    session = make()
    session.join(1, 0, config(words=[[1, 2]], stops=[0], min_tokens=2, presence=1.0))
    session.step({1: 1})
    session.join(1, 0, config(words=[[1, 3], [5, 1, 4]], stops=[0], min_tokens=2, frequency=2.0))
    session.step({1: 5})
    session.step({1: 1})
    assert barred(session.step({1: 1})[1]) == [3, 4]


def test_an_abandoned_step_changes_nothing_and_can_run_again(make):
    session = make()
    session.join(1, 0, CASES["everything"])
    session.step({1: 1})
    ctx = session.context([1])
    step = session.plan(ctx)
    session.edits.apply(torch.zeros(1, VOCAB, device=session.device))
    session.edits.record(torch.tensor([2], device=session.device))
    session.edits.abandon(step, ctx)
    session.edits.abandon(step, ctx)
    session.step({1: 1})


def test_a_step_that_samples_nothing_moves_nothing(make):
    session = make()
    session.join(1, 0, CASES["everything"])
    ctx = session.context([1])
    session.edits.commit(session.plan(ctx), ctx)
    session.step({1: 1})


@pytest.mark.parametrize("slot", [0, 1])
def test_a_captured_step_has_the_same_operators_whoever_is_in_it(slot):
    session = Session()
    session.join(1, 0)
    session.join(2, 1, CASES["everything"])

    def trace(rid):
        ctx = session.context([rid], padding=1, slot=slot)
        step = session.plan(ctx)
        logits = torch.zeros(2, VOCAB)
        _, ops = strict_mode.record(lambda: session.edits.record(session.edited(logits).argmax(-1)))
        session.edits.commit(step, ctx)
        return [op.name for op in ops]

    assert trace(1) == trace(2)


class TestRefusals:
    @pytest.mark.parametrize("token", [-1, VOCAB, 49152, 2**31, 2**40])
    @pytest.mark.parametrize(
        ("field", "made"),
        [
            ("allowed_token_ids", lambda token: config(allowed=[1, token])),
            ("bad_words", lambda token: config(words=[[1], [2, token]])),
            ("stop_token_ids", lambda token: config(stops=[token], min_tokens=1)),
            ("stop_token_ids", lambda token: config(stops=[token])),
            ("logit_bias", lambda token: config(bias={token: 5.0})),
        ],
    )
    def test_an_id_outside_the_vocabulary_is_refused_and_the_neighbour_is_left_alone(self, field, made, token):
        session = Session()
        session.join(1, 1)
        with pytest.raises(ValueError, match=rf"{field} must be token ids in 0\.\.{VOCAB - 1}, got {token}"):
            session.edits.ingest_request(2, 0, made(token))
        session.row_of[2], session.generated[2] = 0, []
        session.step({1: 1, 2: 1}, padding=1)

    @pytest.mark.parametrize(
        ("field", "made"),
        [
            ("bad_words", config(words=[[1], []])),
            ("logit_bias", config(bias={1: float("nan")})),
            ("logit_bias", config(bias={1: float("inf")})),
            ("presence_penalty", config(presence=float("inf"))),
            ("frequency_penalty", config(frequency=float("nan"))),
            ("min_tokens", config(stops=[1], min_tokens=-1)),
            ("allowed_token_ids", LogitEditsReqConfig(allowed_ids=np.array([1.0]))),
            ("logit_bias", LogitEditsReqConfig(bias_ids=np.array([1]))),
            ("logit_bias", LogitEditsReqConfig(bias_ids=np.array([1, 1]), bias=np.ones(2, np.float32))),
        ],
    )
    def test_what_cannot_be_honoured_names_its_field(self, field, made):
        with pytest.raises(ValueError, match=field):
            Session().edits.ingest_request(1, 0, made)

    def test_a_refusal_leaves_an_earlier_ingest_as_it_was(self):
        session = Session()
        session.join(1, 0, CASES["everything"])
        session.step({1: 1})
        with pytest.raises(ValueError, match="logit_bias"):
            session.edits.ingest_request(1, 0, config(bias={VOCAB: 1.0}))
        session.step({1: 1})


ids = st.integers(0, VOCAB - 1)
penalties = st.sampled_from([0.0, 0.0, 1.0, -0.5, 2.0])
configs = st.none() | st.builds(
    config,
    allowed=st.just(()) | st.lists(ids, max_size=VOCAB, unique=True),
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4),
    stops=st.lists(ids, max_size=3, unique=True),
    min_tokens=st.integers(0, 5),
    bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=4),
    presence=penalties,
    frequency=penalties,
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_requests_edits_are_the_same_alone_and_beside_any_neighbours(data):
    session, seen, number = Session(), {}, 0
    owner = {}
    for _ in range(data.draw(st.integers(1, 15), label="steps")):
        for row in data.draw(st.lists(st.integers(0, 4), unique=True), label="rows that change hands"):
            if row in owner:
                session.leave(owner.pop(row))
            else:
                number += 1
                owner[row] = number
                session.join(number, row, data.draw(configs, label=f"request {number}"))
                seen[number] = []
        if not owner:
            continue
        rids = data.draw(st.lists(st.sampled_from(sorted(owner.values())), min_size=1, unique=True), label="batch")
        tokens = {rid: data.draw(st.integers(0, 2)) for rid in rids}
        kept = data.draw(st.none() | st.frozensets(st.sampled_from(rids)), label="kept")
        slot = data.draw(st.sampled_from([None, 0, 1]), label="slot")
        before = {rid: list(session.generated[rid]) for rid in rids}
        edited = session.step(tokens, kept, padding=data.draw(st.integers(0, 2)), slot=slot)
        for rid in rids:
            seen[rid].append((before[rid], session.configs[rid], edited[rid]))
    for rid, steps in seen.items():
        alone = Session()
        for generated, own, wanted in steps:
            if rid not in alone.row_of:
                alone.join(rid, 0, own)
            if len(generated) > len(alone.generated[rid]):
                alone.step({rid: generated[-1]})
            assert alone.step({rid: 0}, kept=frozenset())[rid].tobytes() == wanted.tobytes()
