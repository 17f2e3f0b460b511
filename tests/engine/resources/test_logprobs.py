"""Log-probabilities across steps: of the raw logits, for those who ask; and of a prompt, chunk by chunk."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.logprobs.config import LogprobsReqConfig, LogprobsSpec, LogprobsStep
from mstar.engine.resources.runner import build_resources
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext

VOCAB, CAPACITY, HIDDEN, MAX_TOP = 97, 8, 6, 20
STEP = LogprobsStep()
SLOTS = pytest.mark.parametrize("slot", [pytest.param(None, id="eager"), pytest.param(0, id="leased")])
HEAD = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(9))
NAMES = ("logprob", "logprob_rank", "top_ids", "top_logprobs")


def head(hidden):
    return hidden @ HEAD


def told_of(x, token, count):
    """(logprob, rank, top ids, their logprobs) of one position, in float64; a count of -1 tells of nothing."""
    if count < 0:
        return 0.0, 0, [-1] * MAX_TOP, [0.0] * MAX_TOP
    x = x.astype(np.float64)
    own = x - x.max() - np.log(np.exp(x - x.max()).sum())
    top = np.lexsort((np.arange(x.size), -x))[:count]
    pad = MAX_TOP - top.size
    return own[token], 1 + int((x > x[token]).sum()), [*top.tolist(), *[-1] * pad], [*own[top].tolist(), *[0.0] * pad]


def check(told, wanted):
    for name, part, own in zip(NAMES, told, wanted, strict=True):
        np.testing.assert_allclose(part.numpy(), own, rtol=1e-6, atol=2e-6, err_msg=name)


class Session:
    """The resource alone.  Requests are master rows 0 .. 7, padding rows 8 .. 15."""

    def __init__(self, device="cpu"):
        info = EngineResourceInfo(torch.device(device), torch.float32, torch.float32, CAPACITY, CAPACITY, num_slots=2)
        self.logprobs = build_resources([LogprobsSpec("logprobs", {"LLM"}, VOCAB)], info)["logprobs"]
        self.logprobs.build_accelerator_graph_buffers([], CAPACITY, 64)
        self.row_of = {-2 - i: CAPACITY + i for i in range(CAPACITY)}
        for rid, row in self.row_of.items():
            self.logprobs.ingest_request(rid, row, None)
        self.counts, self.prompts, self.steps = {}, {}, 0

    def join(self, rid, row, num_top=-1, prompt=None, num_prompt_top=-1):
        self.row_of[rid] = row
        config = LogprobsReqConfig(num_top, num_prompt_top, None if prompt is None else np.array(prompt))
        self.logprobs.ingest_request(rid, row, config)
        self.counts[rid] = num_top

    def leave(self, rid):
        self.logprobs.remove_request(rid, self.row_of.pop(rid))
        del self.counts[rid]

    def context(self, rids, spans=None, padding=0, slot=None):
        padded = (*rids, *(-2 - i for i in range(padding)))
        spans = np.array([*(spans or [1] * len(rids)), *[1] * padding], np.int64)
        lease = None if slot is None else SlotLease(slot, BucketKey("decode", len(padded), int(spans.sum())))
        rows = np.array([self.row_of[rid] for rid in padded], np.int64)
        return StepContext("decode", tuple(rids), rows, spans, padded, slot or 0, slot_lease=lease)

    def step(self, rids, logits=None, **context):
        """One decode step; checks what is told of every row, and returns it by request."""
        self.steps += 1
        ctx = self.context(rids, **context)
        rng = np.random.default_rng(self.steps)
        logits = rng.normal(0, 3, (ctx.rows.size, VOCAB)).astype(np.float32) if logits is None else logits
        tokens = rng.integers(0, VOCAB, ctx.rows.size)
        self.logprobs.plan(STEP, ctx)
        changed = torch.from_numpy(logits.copy())
        self.logprobs.observe(changed)
        changed.fill_(-torch.inf)  # edits and masks come behind
        told = self.logprobs.of(torch.from_numpy(tokens))
        self.logprobs.commit(STEP, ctx)
        assert tuple(told) == NAMES
        rows = list(zip(*told.values(), strict=True))
        for rid, row, raw, token in zip(ctx.padded_request_ids, rows, logits, tokens, strict=True):
            check(row, told_of(raw, token, self.counts.get(rid, -1)))
        return dict(zip(rids, rows, strict=False))

    def prefill(self, rids, spans, slice_of=None, **context):
        """One step over chunks of prompts; what is told of their tokens, by request, and all hidden states."""
        ctx = self.context(rids, spans, **context)
        hidden = torch.randn(int(ctx.spans.sum()), HIDDEN, generator=torch.Generator().manual_seed(sum(spans)))
        self.logprobs.plan(STEP, ctx)
        wants = self.logprobs.wants_prompt
        told = self.logprobs.of_prompts(hidden, head)
        self.logprobs.commit(STEP, ctx)
        assert wants == bool(told)
        assert not self.logprobs.wants_prompt
        return told, hidden


@SLOTS
def test_rows_are_told_what_they_asked_for_and_others_nothing(slot):
    session = Session()
    for rid, count in enumerate([-1, 0, 1, 5, 20, -1]):
        session.join(rid, rid, count)
    for padding in (0, 2):
        session.step(range(6), slot=slot, padding=padding)
    session.step([4, 0, 2], slot=slot)


@SLOTS
def test_nobody_asks(slot):
    session = Session()
    session.join(1, 0)
    for padding in (1, 0, 1):
        session.step([1], slot=slot, padding=padding)
    assert not session.logprobs.wants_prompt


def test_what_was_told_is_not_changed_by_later_steps():
    session = Session()
    session.join(1, 0, 5)
    session.join(2, 1)
    first = session.step([1, 2], slot=0)
    before = [part.clone() for part in first[1]]
    session.step([1, 2], slot=0)
    session.step([2], slot=0, padding=1)
    assert all(map(torch.equal, before, first[1]))


def test_tokens_at_minus_infinity_make_no_nan():
    session = Session()
    session.join(1, 0, 20)
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, [3, 50]] = 1.0, 2.0
    with np.errstate(divide="ignore"):
        _, _, ids, values = session.step([1], logits)[1]
    assert ids[:3].tolist() == [50, 3, 0]
    assert values[2] == -torch.inf
    assert not values.isnan().any()


def test_bfloat16_logits_are_told_in_float32():
    session = Session()
    session.join(1, 0, 3)
    ctx = session.context([1])
    session.logprobs.plan(STEP, ctx)
    logits = torch.linspace(-3, 3, VOCAB).to(torch.bfloat16)[None]
    session.logprobs.observe(logits)
    told = session.logprobs.of(torch.tensor([4]))
    check([part[0] for part in told.values()], told_of(logits[0].float().numpy(), 4, 3))


@SLOTS
def test_a_reused_row_asks_for_what_its_new_request_does(slot):
    session = Session()
    session.join(1, 3, 5)
    session.step([1], slot=slot)
    session.leave(1)
    session.join(2, 3)
    session.step([2], slot=slot)
    session.join(2, 3, 2)
    session.step([2], slot=slot)
    session.logprobs.remove_request(99, 3)
    session.step([2], slot=slot)


def test_an_abandoned_step_can_run_again():
    session = Session()
    session.join(1, 0, prompt=[4, 5, 6], num_prompt_top=1)
    ctx = session.context([1], [2])
    session.logprobs.plan(STEP, ctx)
    session.logprobs.abandon(STEP, ctx)
    assert not session.logprobs.wants_prompt
    told, _ = session.prefill([1], [3])
    assert told[1]["prompt_rank"][0].numel() == 2


@pytest.mark.parametrize("asks", [(-1, -1), (3, -1), (0, 20)])
def test_a_captured_step_has_the_same_operators_whoever_asks(asks):
    session = Session()
    for rid, count in enumerate(asks):
        session.join(rid, rid, count)
    session.logprobs.plan(STEP, session.context([0, 1], slot=0))

    def forward():
        session.logprobs.observe(logits)
        return session.logprobs.of(tokens)

    logits, tokens = torch.randn(2, VOCAB), torch.tensor([1, 2])
    _, trace = strict_mode.record(forward)
    assert [op.name for op in trace] == ["opaque::logprobs_observe", "opaque::logprobs_of"]


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(-1, MAX_TOP), min_size=1, max_size=CAPACITY),
    padding=st.integers(0, 3),
    slot=st.sampled_from([None, 0, 1]),
)
def test_a_request_is_told_the_same_alone_and_beside_any_neighbours(counts, padding, slot):
    session = Session()
    for rid, count in enumerate(counts):
        session.join(rid, rid, count)
    ctx = session.context(range(len(counts)), padding=padding, slot=slot)
    logits, tokens = torch.randn(ctx.rows.size, VOCAB), torch.arange(ctx.rows.size)
    together = observed(session, ctx, logits, tokens)
    for rid, count in enumerate(counts):
        alone = Session()
        alone.join(rid, 5, count)
        own = observed(alone, alone.context([rid]), logits[rid : rid + 1], tokens[rid : rid + 1])
        assert all(torch.equal(own[name][0], together[name][rid]) for name in NAMES)


def observed(session, ctx, logits, tokens):
    session.logprobs.plan(STEP, ctx)
    session.logprobs.observe(logits)
    return session.logprobs.of(tokens)


class TestPrompts:
    def told(self, session, rid, chunks, count, prompt):
        """Every record of a prompt that runs in these chunks, checked against its own hidden states."""
        position, records = 0, []
        for chunk in chunks:
            told, hidden = session.prefill([rid], [chunk])
            wanted = range(position, min(position + chunk, len(prompt) - 1))
            if not wanted:
                assert told == {}
                continue
            columns = [values[0] for values in told[rid].values()]
            assert list(told[rid]) == [f"prompt_{name}" for name in ("logprob", "rank", "top_ids", "top_logprobs")]
            assert [(c.dtype, c.shape[0]) for c in columns] == [
                (dtype, len(wanted)) for dtype in (torch.float32, torch.int32, torch.int32, torch.float32)
            ]
            for i, (at, *row) in enumerate(zip(wanted, *columns, strict=True)):
                check(row, told_of(head(hidden[i]).numpy(), prompt[at + 1], count))
            records.append(len(wanted))
            position += chunk
        return sum(records)

    @pytest.mark.parametrize("chunks", [[9], [4, 5], [1, 1, 7], [8, 1], [3, 3, 3]])
    @pytest.mark.parametrize("count", [0, 3, 20])
    def test_each_token_but_the_first_is_told_of_however_the_prompt_is_cut(self, chunks, count):
        session, prompt = Session(), [5, 90, 3, 3, 0, 96, 12, 7, 44]
        session.join(1, 0, prompt=prompt, num_prompt_top=count)
        assert self.told(session, 1, chunks, count, prompt) == len(prompt) - 1
        assert session.prefill([1], [1])[0] == {}, "generated tokens are none of the prompt"

    def test_a_long_prompt_is_told_of_in_slices(self):
        session, prompt = Session(), np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
        session.join(1, 0, prompt=prompt, num_prompt_top=2)
        ctx, sizes = session.context([1], [200]), []
        session.logprobs.plan(STEP, ctx)
        told = session.logprobs.of_prompts(torch.randn(200, HIDDEN), lambda h: sizes.append(len(h)) or head(h))
        assert sizes == [64, 64, 64, 7]
        assert told[1]["prompt_top_ids"][0].shape == (199, MAX_TOP)

    def test_rows_of_one_step_are_told_apart(self):
        session, prompts = Session(), {1: [1, 2, 3, 4], 2: [5, 6, 7], 4: [8, 9, 10]}
        for rid, prompt in prompts.items():
            session.join(rid, rid, prompt=prompt, num_prompt_top=rid)
        session.join(3, 3, num_top=5)
        told, hidden = session.prefill([3, 2, 1, 4], [1, 3, 4, 2], padding=2)
        assert list(told) == [2, 1, 4]
        for rid, start, length in ((2, 1, 2), (1, 4, 3), (4, 8, 2)):
            columns = [values[0] for values in told[rid].values()]
            for i, *row in zip(range(length), *columns, strict=True):
                check(row, told_of(head(hidden[start + i]).numpy(), prompts[rid][i + 1], rid))

    @pytest.mark.parametrize("prompt", [[], [3]])
    def test_a_prompt_too_short_to_predict_itself_has_nothing_to_tell(self, prompt):
        session = Session()
        session.join(1, 0, prompt=prompt, num_prompt_top=5)
        assert session.prefill([1], [1])[0] == {}

    def test_a_reused_row_begins_its_prompt_anew_and_ingest_again_does_not(self):
        session = Session()
        for rid in (1, 2):
            session.join(rid, 0, prompt=[1, 2, 3, 4], num_prompt_top=0)
            assert session.prefill([rid], [3])[0][rid]["prompt_rank"][0].numel() == 3
            session.join(rid, 0, prompt=[1, 2, 3, 4], num_prompt_top=0)
            assert session.prefill([rid], [1])[0] == {}
            session.leave(rid)

    def test_what_a_cached_prefix_skipped_is_not_told_of(self):
        session, prompt = Session(), [1, 2, 3, 4, 5]
        session.join(1, 0, prompt=prompt, num_prompt_top=2)
        session.logprobs.apply_cached_prefix(1, 0, 2)
        told, hidden = session.prefill([1], [3])
        columns = [values[0] for values in told[1].values()]
        for i, *row in zip(range(2), *columns, strict=True):
            check(row, told_of(head(hidden[i]).numpy(), prompt[3 + i], 2))


class TestRefusals:
    @pytest.mark.parametrize("count", [-2, MAX_TOP + 1, 49152, 49153, 10**6, 1.5])
    @pytest.mark.parametrize(("field", "name"), [("logprobs", "num_top"), ("prompt_logprobs", "num_prompt_top")])
    def test_more_than_the_cap_or_less_than_none_is_refused(self, field, name, count):
        config = LogprobsReqConfig(**{name: count, "prompt_ids": np.array([1, 2])})
        session = Session()
        with pytest.raises(ValueError, match=rf"^{field} must be an integer in 0\.\.20.*got {count}"):
            session.logprobs.ingest_request(1, 0, config)
        session.row_of[1] = 0
        session.step([1])

    @pytest.mark.parametrize("prompt", [None, np.array([1, -1]), np.array([VOCAB])])
    def test_a_prompt_that_cannot_be_told_of_is_refused(self, prompt):
        with pytest.raises(ValueError, match="prompt"):
            Session().logprobs.ingest_request(1, 0, LogprobsReqConfig(num_prompt_top=1, prompt_ids=prompt))

    @pytest.mark.parametrize("vocab", [1, 13])
    def test_a_vocabulary_smaller_than_the_cap_is_told_of_whole(self, vocab):
        info = EngineResourceInfo(torch.device("cpu"), torch.float32, torch.float32, 1, 0)
        logprobs = build_resources([LogprobsSpec("logprobs", {"LLM"}, vocab)], info)["logprobs"]
        logprobs.ingest_request(1, 0, LogprobsReqConfig(num_top=MAX_TOP))
        logprobs.plan(STEP, StepContext("decode", (1,), np.zeros(1, np.int64), np.ones(1, np.int64)))
        logits = torch.randn(1, vocab)
        logprobs.observe(logits)
        told = logprobs.of(torch.tensor([0]))
        check([part[0] for part in told.values()], told_of(logits[0].numpy(), 0, MAX_TOP))
