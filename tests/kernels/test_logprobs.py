"""What is told of a position, against float64 NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mstar.kernels import logprobs
from mstar.kernels.cpu.top_tokens import top_tokens

TOPS = pytest.mark.parametrize("top", [logprobs.top_tokens, top_tokens], ids=["reference", "cpu"])


def expected_top(x, k):
    return np.lexsort((np.arange(x.size), -x.astype(np.float64)))[:k]


def log_softmax(x):
    x = x.astype(np.float64)
    with np.errstate(divide="ignore"):
        return x - x.max() - np.log(np.exp(x - x.max()).sum())


@TOPS
@pytest.mark.parametrize("vocab", [20, 97, 1000, 49152])
def test_top_tokens_are_the_largest(top, vocab):
    x = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    for k in (1, 5, 20):
        assert top(x, k).tolist() == [expected_top(row, k).tolist() for row in x.numpy()]


@TOPS
@settings(max_examples=60, deadline=None)
@given(
    x=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.sampled_from([3, 64, 130, 700])),
        elements=st.sampled_from([-np.inf, -2.5, -0.0, 0.0, 1.0, 1.5, 2.0**127]),
        fill=st.sampled_from([-np.inf, -3.0, 0.0]),
    ),
    k=st.integers(1, 20),
)
def test_ties_go_to_the_lowest_id(top, x, k):
    k = min(k, x.shape[1])
    assert top(torch.from_numpy(x), k).tolist() == [expected_top(row, k).tolist() for row in x]


@TOPS
def test_rows_of_nan_or_without_a_finite_logit_raise_nothing(top):
    x = torch.randn(3, 2000)
    x[0], x[1, :50] = -torch.inf, torch.nan
    ids = top(x, 20)
    assert ids.shape == (3, 20)
    assert ids[0].tolist() == list(range(20))
    assert ids[2].tolist() == expected_top(x[2].numpy(), 20).tolist()


@TOPS
@pytest.mark.parametrize(("vocab", "scale"), [(13, 1), (1000, 30), (40000, 4)])
def test_told_numbers_are_those_of_float64(top, vocab, scale):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, vocab, generator=generator) * scale
    x[1] += 1e4
    x[2, ::2] = -torch.inf
    tokens = torch.tensor([0, 1, 3, 4, 5, vocab - 1])
    num_top = torch.tensor([20, 5, 3, 0, -1, 1])
    told = logprobs.tell(x, tokens, num_top, 20, 20, top)
    for i, row in enumerate(x.numpy()):
        own = log_softmax(row)
        count = min(int(num_top[i]), vocab)
        if count < 0:
            assert (told.logprob[i], told.rank[i]) == (0, 0)
        else:
            assert told.logprob[i].item() == pytest.approx(own[tokens[i]], rel=1e-6, abs=2e-6)
            assert told.rank[i] == 1 + (row > row[tokens[i]]).sum()
        wanted = expected_top(row, max(count, 0))
        assert told.top_ids[i].tolist() == [*wanted.tolist(), *[-1] * (20 - wanted.size)]
        np.testing.assert_allclose(told.top_logprobs[i, : wanted.size], own[wanted], rtol=1e-6, atol=2e-6)
        assert not told.top_logprobs[i, wanted.size :].any()


def test_a_chosen_token_at_minus_infinity_ranks_behind_every_other():
    x = torch.tensor([[1.0, -torch.inf, 0.0, -torch.inf]])
    told = logprobs.tell(x, torch.tensor([3]), torch.tensor([4]), 4, 5)
    assert told.logprob.tolist() == [-torch.inf]
    assert told.rank.tolist() == [3]
    assert told.top_ids.tolist() == [[0, 2, 1, 3, -1]]


def test_a_row_without_a_finite_logit_makes_no_nan():
    told = logprobs.tell(torch.full((1, 9), -torch.inf), torch.tensor([2]), torch.tensor([3]), 3, 3)
    assert not any(part.isnan().any() for part in told if part.is_floating_point())


def test_a_row_is_told_the_same_alone_and_among_others():
    x = torch.randn(7, 40000, generator=torch.Generator().manual_seed(3)) * 5
    tokens, num_top = torch.arange(7), torch.full((7,), 20)
    together = logprobs.tell(x, tokens, num_top, 20, 20, top_tokens)
    for i in range(7):
        own = slice(i, i + 1)
        alone = logprobs.tell(x[own].clone(), tokens[own], num_top[own], 20, 20, top_tokens)
        assert all(torch.equal(one[0], all_[i]) for one, all_ in zip(alone, together, strict=True))


def test_no_more_of_the_most_likely_are_looked_for_than_anybody_wants():
    looked = []

    def top(x, k):
        looked.append(k)
        return logprobs.top_tokens(x, k)

    x, tokens = torch.randn(2, 50), torch.tensor([1, 2])
    for most in (3, 0, -1):
        told = logprobs.tell(x, tokens, torch.tensor([most, -1]), most, 20, top)
        assert (told.top_ids >= 0).sum() == max(most, 0)
    assert looked == [3]
