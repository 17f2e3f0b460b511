"""One draw per row: which tokens the filters keep, and which of them the race takes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rows import DEFAULTS, rows_of

from mstar.kernels import sampling
from mstar.kernels.sampling import keep_floor, neg_log_noise, race, sample_rows, scaled_scores

SKEWED = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draw(logits, *rows, apply_filters=True):
    return sample_rows(logits, rows_of(*rows), apply_filters)[0].tolist()


def kept_by_definition(logits, row):
    """The kept set from sorted probabilities in double precision, as the rules read."""
    row = DEFAULTS | row
    scores = ((logits - logits.max()) / row["temperature"]).double()
    p = scores.softmax(-1)
    kept = p >= row["min_p"] * p.max()
    p = torch.where(kept, p, 0) / p[kept].sum()
    above = torch.tensor([p[p > x].sum() for x in p])
    rank = torch.tensor([(p > x).sum() for x in p])
    k = row["top_k"] or p.numel()
    in_k = rank < k
    total = p.sum() if row["top_p_first"] else p[in_k].sum()
    in_p = (above < row["top_p"] * total) | (rank < row["top_p_min_keep"]) if row["top_p"] < 1 else in_k | True
    return set(torch.nonzero(kept & in_k & in_p).flatten().tolist())


def kept_by_kernel(logits, row):
    batch = rows_of(row)
    scores = scaled_scores(logits[None], logits.max()[None], batch.temperature)
    floor = keep_floor(scores, batch, apply_filters=True)
    return set(torch.nonzero(scores[0] >= floor).flatten().tolist())


def race_over_all(logits, row):
    """The race without pruning: every kept token is given its noise."""
    row = DEFAULTS | row
    batch = rows_of(row)
    scores = scaled_scores(logits[None], logits.max()[None], batch.temperature)[0]
    n = scores.numel()
    noise = neg_log_noise(np.full(n, row["seed"]), np.full(n, row["offset"]), np.arange(n))
    result = scores + torch.from_numpy(noise)
    result[scores < keep_floor(scores[None], batch, True)] = -torch.inf
    return int(result.argmax())


def test_known_sequence():
    assert [draw(SKEWED[None], {"offset": i})[0] for i in range(12)] == [1, 1, 1, 2, 2, 0, 0, 0, 0, 1, 2, 0]


def test_frequencies_are_the_probabilities():
    n = 40_000
    scores = scaled_scores(SKEWED.expand(n, 4), SKEWED.max().expand(n), torch.ones(n))
    tokens = race(scores, torch.full((n,), -torch.inf), np.full(n, 42), np.arange(n), np.zeros(n, np.int64))
    assert np.abs(np.bincount(tokens, minlength=4) / n - [0.5, 0.3, 0.15, 0.05]).max() < 0.003


def test_noise_stays_within_the_bound_that_prunes(monkeypatch):
    for word, low, high in ((0, 22.8, float(sampling.MAX_NOISE)), (2**32 - 1, -2.82, -2.8)):
        monkeypatch.setattr(sampling, "philox_words", lambda *_, word=word: np.array([word], np.uint32))
        assert low < neg_log_noise(np.zeros(1), np.zeros(1), np.zeros(1))[0] < high


@pytest.mark.parametrize("vocab", [4, 1000, 20_000])
@pytest.mark.parametrize("scale", [1.0, 4.0, 12.0])
def test_pruned_race_equals_the_full_race(vocab, scale):
    torch.manual_seed(vocab)
    for seed in range(8):
        logits, row = torch.randn(vocab) * scale, {"seed": seed, "offset": seed * 3}
        assert draw(logits[None], row) == [race_over_all(logits, row)]


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8), min_size=2, max_size=300),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1e-9, 0.05, 0.31, 0.83, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.27]),
    top_p_first=st.booleans(),
    min_keep=st.integers(1, 5),
)
def test_kept_tokens_are_those_of_the_definition(logits, temperature, top_k, top_p, min_p, top_p_first, min_keep):
    row = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "top_p_first": top_p_first,
        "top_p_min_keep": min_keep,
    }
    logits = torch.tensor(logits, dtype=torch.float32)
    assert kept_by_kernel(logits, row) == kept_by_definition(logits, row)


def test_a_nucleus_larger_than_the_first_look_is_whole():
    logits = torch.linspace(0, -1, 5000)
    assert kept_by_kernel(logits, {"top_p": 0.9}) == kept_by_definition(logits, {"top_p": 0.9})


def test_top_p_first_cuts_the_full_distribution():
    # Of the top 2, .5 is 62 %: enough for .6.  Of everything it is 50 %: not enough.
    assert kept_by_kernel(SKEWED, {"top_k": 2, "top_p": 0.6}) == {0}
    assert kept_by_kernel(SKEWED, {"top_k": 2, "top_p": 0.6, "top_p_first": True}) == {0, 1}


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 5}, {0, 1, 2, 3}),
        ({"top_k": 2**62}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 1e-9, "top_p_min_keep": 3}, {0, 1, 2}),
        ({"top_p": 1e-9, "top_p_min_keep": 2**62}, {0, 1, 2, 3}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0}),
    ],
)
def test_filters(row, kept):
    assert kept_by_kernel(SKEWED, row) == kept


def test_top_p_of_one_never_drops_the_tail():
    logits = torch.cat((torch.zeros(1), torch.full((5000,), -60.0)))
    assert len(kept_by_kernel(logits, {"top_p": 1.0})) == 5001


def test_all_ties_at_a_cut_are_kept():
    assert kept_by_kernel(torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]), {"top_k": 2}) == {0, 1, 2, 3}


@pytest.mark.parametrize("row", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.2, "min_p": 1.0}])
def test_greedy_takes_the_lowest_id_of_the_maximum_whatever_the_seed(row):
    logits = torch.zeros(100, 20)
    logits[:, [5, 9]] = 3.0
    assert draw(logits, *(row | {"seed": i, "offset": i} for i in range(100))) == [5] * 100


def test_rows_do_not_change_with_their_neighbours():
    torch.manual_seed(1)
    logits = torch.randn(48, 1000) * 4
    kinds = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.8},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"top_k": 30, "top_p": 0.5, "top_p_first": True, "top_p_min_keep": 3},
    ]
    rows = [kinds[i % 6] | {"seed": i, "offset": i % 7} for i in range(48)]
    together = draw(logits, *rows)
    assert together == [draw(logits[i : i + 1], rows[i])[0] for i in range(48)]
    order = torch.randperm(48).tolist()
    assert draw(logits[order], *(rows[i] for i in order)) == [together[i] for i in order]


def test_without_filters_top_k_and_top_p_are_ignored_and_min_p_is_not():
    offsets = [{"top_k": 1, "top_p": 0.1, "min_p": 0.2, "offset": i} for i in range(200)]
    assert set(draw(SKEWED.expand(200, 4), *offsets, apply_filters=False)) == {0, 1, 2}


def test_a_barred_token_never_wins():
    logits = torch.full((300, 50), -torch.inf)
    logits[:, 7] = -1e30
    assert set(draw(logits, *({"offset": i, "temperature": 1e30} for i in range(300)))) == {7}


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-5, 2.0, 1e30, float(np.finfo(np.float32).max)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_temperature_gives_a_token(temperature, dtype):
    logits = torch.tensor([[-100.0, 100.0, 99.0, -torch.inf]], dtype=dtype)
    tokens, faults = sample_rows(logits, rows_of({"temperature": temperature}), True)
    assert not faults.any()
    assert tokens.item() in ({1} if temperature <= 1e-5 else {0, 1, 2})


@pytest.mark.parametrize("row", [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5}])
def test_rows_without_usable_logits_are_faults_and_leave_others_alone(row):
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    alone = draw(logits[1:2], row)
    logits[0, 29] = torch.nan
    logits[2] = -torch.inf
    logits[3, 4] = torch.inf
    logits[4, :20] = -torch.inf
    tokens, faults = sample_rows(logits, rows_of(*[row] * 5), True)
    assert faults.dtype == torch.int8
    assert faults.tolist() == [1, 0, 1, 1, 0]
    assert sample_rows(logits, rows_of(*[row] * 5), True, is_constrained=True)[1].tolist() == [1, 0, 2, 1, 0]
    assert tokens[[0, 2, 3]].tolist() == [0, 0, 0]
    assert tokens[1:2].tolist() == alone
    assert tokens[4] >= 20


def test_same_seed_and_offset_give_the_same_token_and_others_differ():
    logits = torch.zeros(64, 1000)
    assert len(set(draw(logits, *[{"seed": 5, "offset": 9}] * 64))) == 1
    assert len(set(draw(logits, *({"seed": 5, "offset": i} for i in range(64))))) > 50
    assert len(set(draw(logits, *({"seed": i} for i in range(64))))) > 50
