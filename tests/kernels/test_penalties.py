"""Penalties and the floor under a request's length: what each entry becomes, in place and as tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mstar.kernels import penalties
from mstar.kernels.cpu import penalties as in_place

MOST = float(np.finfo(np.float32).max)


def some_of(*values):
    return st.sampled_from([float(np.float32(value)) for value in values])


LOGITS = some_of(0.0, -0.0, 1.0, -1.0, 7.5, -3.25, 1e-30, MOST, -MOST, np.inf, -np.inf, np.nan)
PENALTIES = some_of(1.0, 1.3, 0.5, 3.0, penalties.LEAST_FACTOR, penalties.MOST_FACTOR)
VOCAB = 40


def expected(x, factor):
    """One entry by the rule, in double precision."""
    if not np.isfinite(x):
        return x
    return float(np.clip(x / factor if x > 0 else x * factor, -MOST, MOST))


def rows_of(data, strategy, shape, dtype):
    return data.draw(hnp.arrays(dtype, shape, elements=strategy))


def assert_equal(got, wanted):
    np.testing.assert_allclose(got, np.asarray(wanted, np.float32), rtol=2e-7, atol=1e-45)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 3))
def test_the_presence_penalty_moves_each_seen_token_once(data, n):
    x = rows_of(data, LOGITS, (5, VOCAB), np.float32)
    at = np.array(data.draw(st.permutations(range(5))))[:n]
    seen, penalty = rows_of(data, st.booleans(), (n, VOCAB), bool), rows_of(data, PENALTIES, n, np.float32)
    wanted = x.astype(np.float64)
    for i, row in enumerate(at):
        wanted[row, seen[i]] = [expected(value, float(penalty[i])) for value in wanted[row, seen[i]]]
    tensors = penalties.presence_penalty(*map(torch.from_numpy, (x[at], seen, penalty)))
    in_place.apply_presence_penalty(x, at, seen, penalty)
    assert_equal(x, wanted)
    assert_equal(tensors.numpy(), wanted[at])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 3), width=st.integers(1, 6))
def test_the_window_penalty_moves_a_token_as_often_as_it_stands_in_the_window(data, n, width):
    x = rows_of(data, LOGITS, (5, VOCAB), np.float32)
    at = np.array(data.draw(st.permutations(range(5))))[:n]
    recent = rows_of(data, st.sampled_from([-1, 0, 3, 3, VOCAB - 1]), (n, width), np.int64)
    penalty = rows_of(data, PENALTIES, n, np.float32)
    wanted = x.astype(np.float64)
    for i, row in enumerate(at):
        for token in set(recent[i].tolist()) - {-1}:
            factor = np.clip(float(penalty[i]) ** int((recent[i] == token).sum()), penalties.LEAST_FACTOR, MOST)
            wanted[row, token] = expected(wanted[row, token], factor)
    tensors = penalties.window_penalty(*map(torch.from_numpy, (x[at], recent, penalty)))
    in_place.apply_window_penalty(x, at, recent, penalty)
    assert_equal(x, wanted)
    assert_equal(tensors.numpy(), wanted[at])


@pytest.mark.parametrize("penalty", [penalties.LEAST_FACTOR, 0.5, 1.0, 1.7, penalties.MOST_FACTOR])
def test_both_forms_have_the_same_bits_so_that_no_path_moves_a_draw(penalty):
    rng = np.random.default_rng(0)
    x, seen = rng.normal(0, 5, (4, 3000)).astype(np.float32), rng.random((4, 3000)) < 0.2
    recent, factors = rng.integers(-1, 50, (4, 64)), np.full(4, penalty, np.float32)
    for apply, tensors, history in (
        (in_place.apply_presence_penalty, penalties.presence_penalty, seen),
        (in_place.apply_window_penalty, penalties.window_penalty, recent),
    ):
        changed = x.copy()
        apply(changed, np.arange(4), history, factors)
        np.testing.assert_array_equal(changed, tensors(*map(torch.from_numpy, (x, history, factors))).numpy())
        assert np.array_equal(changed, x) == (penalty == 1)
        assert np.isfinite(changed).all()


STOPS = np.array([2, 7, 39])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(0, 3))
def test_the_floor_bars_stop_ids_but_never_the_last_tokens_left(data, n):
    x = rows_of(data, some_of(-np.inf, -np.inf, -np.inf, 0.0, 4.0, -1e30), (4, VOCAB), np.float32)
    at = np.array(data.draw(st.permutations(range(4))), np.int64)[:n]
    wanted = x.copy()
    for row in at:
        if np.isfinite(np.delete(x[row], STOPS)).any():
            wanted[row, STOPS] = -np.inf
    is_short = torch.zeros(4, dtype=torch.bool).index_fill(0, torch.from_numpy(at), True)
    tensors = penalties.length_floor(torch.from_numpy(x.copy()), torch.from_numpy(STOPS), is_short)
    if n:
        in_place.apply_length_floor(x, at, STOPS)
    np.testing.assert_array_equal(x, wanted)
    np.testing.assert_array_equal(tensors.numpy(), wanted)


@pytest.mark.parametrize("only", [0, 1023, 1024, 9215, 9216, 50_000, None])
def test_a_lone_token_that_is_no_stop_id_is_found_wherever_it_stands(only):
    x = np.full((2, 50_001), -np.inf, np.float32)
    x[:, STOPS] = 1.0
    if only is not None:
        x[0, only] = -3.0
    in_place.apply_length_floor(x, np.array([0]), STOPS)
    barred = np.isneginf(x[0, STOPS])
    assert barred.all() if only is not None else not barred.any()
    assert not np.isneginf(x[1, STOPS]).any(), "a row that is not short is left alone"
