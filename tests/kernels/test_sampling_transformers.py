"""Every filter alone, and all of them in our order, against the logits processors of transformers."""

import numpy as np
import pytest
import torch
from sampling_rows import rows_of
from transformers import (
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mstar.kernels.cpu.penalties import apply_length_floor, apply_presence_penalty
from mstar.kernels.sampling import kept_probabilities

VOCABS = pytest.mark.parametrize("vocab", [1_000, 49_152, 151_936])
BATCH, PROMPT = 3, 50


def random_logits(vocab, scale=3.0):
    return torch.randn(BATCH, vocab, generator=torch.Generator().manual_seed(vocab)) * scale


def random_ids(vocab):
    return torch.randint(vocab, (BATCH, PROMPT), generator=torch.Generator().manual_seed(vocab + 1))


def theirs(scores, ids, *processors):
    """The distribution behind the processors, in double precision, and the one before the last of them."""
    before = scores = scores.double()
    for processor in processors:
        before, scores = scores, processor(ids, scores.clone())
    return scores.softmax(-1), before.softmax(-1)


def mass_above(p):
    """Of each token, the mass of those strictly likelier."""
    values, order = p.sort(-1, descending=True)
    return torch.zeros_like(p).scatter(-1, order, values.cumsum(-1) - values)


def assert_same_distribution(ours, expected, before, top_p):
    assert (ours - expected).abs().max() < 1e-4
    differ = (ours > 0) != (expected > 0)
    if differ.any():
        assert top_p is not None
        assert (mass_above(before)[differ] - top_p).abs().max() < 1e-5


CASES = {
    "temperature": ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    "high-temperature": ({"temperature": 2.5}, [TemperatureLogitsWarper(2.5)]),
    "min-p": ({"min_p": 0.03}, [MinPLogitsWarper(0.03)]),
    "min-p-1": ({"min_p": 1.0}, [MinPLogitsWarper(1.0)]),
    "top-k": ({"top_k": 40}, [TopKLogitsWarper(40)]),
    "top-k-2": ({"top_k": 2}, [TopKLogitsWarper(2)]),
    "top-p": ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
    "top-p-low": ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
    "top-p-high": ({"top_p": 0.999}, [TopPLogitsWarper(0.999)]),
    "top-k-top-p": ({"top_k": 64, "top_p": 0.95}, [TopKLogitsWarper(64), TopPLogitsWarper(0.95)]),
    "top-p-first": (
        {"top_k": 30, "top_p": 0.3, "top_p_first": True},
        [TopKLogitsWarper(2**30), TopPLogitsWarper(0.3)],
    ),
    "min-keep": ({"top_p": 1e-6, "top_p_min_keep": 5}, [TopPLogitsWarper(1e-6, min_tokens_to_keep=5)]),
    "all": (
        {"temperature": 0.8, "min_p": 0.002, "top_k": 300, "top_p": 0.93},
        [TemperatureLogitsWarper(0.8), MinPLogitsWarper(0.002), TopKLogitsWarper(300), TopPLogitsWarper(0.93)],
    ),
}


def test_the_table_has_no_case_whose_filters_drop_nothing():
    logits = random_logits(1_000)
    for name, (row, _) in CASES.items():
        kept = (kept_probabilities(logits, rows_of(*[row] * BATCH), True) > 0).sum(-1)
        assert ((kept < 1_000) == ("temperature" not in name)).all(), name


@VOCABS
@pytest.mark.parametrize("name", CASES)
def test_filters_keep_the_same_tokens_with_the_same_probabilities(vocab, name):
    row, processors = CASES[name]
    logits = random_logits(vocab)
    ours = kept_probabilities(logits, rows_of(*[row] * BATCH), True)
    if row.get("top_p_first"):
        expected, before = theirs(logits, None, processors[-1])
        # Both on the full distribution: the nucleus, then no more than the k likeliest of it.
        expected, _ = theirs(expected.log(), None, TopKLogitsWarper(row["top_k"]))
    else:
        expected, before = theirs(logits, None, *processors)
    assert_same_distribution(ours, expected, before, row.get("top_p"))


@VOCABS
@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_presence_penalty_is_the_repetition_penalty(vocab, penalty):
    logits, ids = random_logits(vocab), random_ids(vocab)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    seen = torch.zeros(BATCH, vocab, dtype=torch.bool).scatter(1, ids, True)
    ours = logits.clone()
    apply_presence_penalty(ours.numpy(), np.arange(BATCH), seen.numpy(), np.full(BATCH, penalty, np.float32))
    assert torch.equal(ours, expected)


@VOCABS
@pytest.mark.parametrize(("least", "is_short"), [(PROMPT, False), (PROMPT + 1, True)])
def test_the_floor_is_the_minimum_length(vocab, least, is_short):
    logits, ids, stops = random_logits(vocab), random_ids(vocab), [2, 17, vocab - 1]
    expected = MinLengthLogitsProcessor(least, stops)(ids, logits.clone())
    ours = logits.clone()
    if is_short:
        apply_length_floor(ours.numpy(), np.arange(BATCH), np.array(stops))
    assert torch.equal(ours, expected)


@VOCABS
def test_everything_in_our_order(vocab):
    logits, ids, penalty, stops = random_logits(vocab), random_ids(vocab), 1.2, logits_argmax(vocab)
    row, warpers = CASES["all"]
    expected, before = theirs(
        logits,
        ids,
        RepetitionPenaltyLogitsProcessor(penalty),
        MinLengthLogitsProcessor(PROMPT + 5, stops),
        *warpers,
    )
    x = logits.clone()
    seen = torch.zeros(BATCH, vocab, dtype=torch.bool).scatter(1, ids, True)
    apply_presence_penalty(x.numpy(), np.arange(BATCH), seen.numpy(), np.full(BATCH, penalty, np.float32))
    apply_length_floor(x.numpy(), np.arange(BATCH), np.array(stops))
    ours = kept_probabilities(x, rows_of(*[row] * BATCH), True)
    assert not ours[:, stops].any()
    assert_same_distribution(ours, expected, before, row["top_p"])


def logits_argmax(vocab):
    """Stop ids that matter: every row's likeliest token."""
    return sorted(set(random_logits(vocab).argmax(-1).tolist()))
