"""The draw follows its distribution, and draws of other seeds, offsets and rows are independent: chi-square tests."""

import numpy as np
import pytest
import torch
from sampling_rows import DEFAULTS

from mstar.kernels.cpu.draw import sample_rows
from mstar.kernels.sampling import RowSettings, kept_probabilities

DRAWS = 100_000
LOGITS = torch.tensor([1.5, 1.0, 0.8, 0.2, 0.0, -0.3, -0.5, -0.9, -1.4, -2.0, -2.5, -torch.inf])
CASES = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "all": {"temperature": 1.4, "top_k": 8, "top_p": 0.85, "min_p": 0.06},
    "top-p-first": {"top_k": 6, "top_p": 0.9, "top_p_first": True},
}


def settings_of(row, **columns):
    """``DRAWS`` rows of the same settings but for ``columns`` int64 [DRAWS]."""
    kinds = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32, "top_p_first": torch.bool}
    base = DEFAULTS | row
    return RowSettings(
        *(
            columns[name] if name in columns else torch.full((DRAWS,), base[name], dtype=kinds.get(name, torch.int64))
            for name in RowSettings._fields
        )
    )


def drawn(row=None, **columns):
    tokens, faults = sample_rows(LOGITS.expand(DRAWS, -1), settings_of(row or {}, **columns), True)
    assert not faults.any()
    return tokens.numpy()


def probabilities(row):
    """Of the tokens a case keeps, from the rules in double precision."""
    row = DEFAULTS | row
    p = (LOGITS.double() / row["temperature"]).softmax(-1).numpy()
    kept = p >= row["min_p"] * p.max()
    p = np.where(kept, p, 0) / p[kept].sum()
    rank, above = np.argsort(np.argsort(-p)), np.array([p[p > x].sum() for x in p])
    in_k = rank < (row["top_k"] or p.size)
    total = 1 if row["top_p_first"] else p[in_k].sum()
    kept = in_k & (p > 0) & ((above < row["top_p"] * total) | (row["top_p"] == 1))
    return np.where(kept, p, 0) / p[kept].sum()


def p_value(counts, expected):
    """Survival function of chi-square over the cells that can be drawn."""
    cells = expected > 0
    assert (expected[cells] >= 5).all()
    assert not counts[~cells].any(), "a token that is filtered out was drawn"
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    freedom = cells.sum() - 1
    return torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)).item()


def test_the_survival_function_is_that_of_published_tables():
    expected = np.full(11, 100.0)
    for statistic, value in ((18.307, 0.05), (23.209, 0.01), (29.588, 0.001)):  # ten degrees of freedom
        counts = expected.copy()
        counts[0] += np.sqrt(statistic * 100.0)
        assert p_value(counts, expected) == pytest.approx(value, rel=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_what_the_reference_tells_is_what_the_rules_say(name):
    settings = RowSettings(*(column[:1] for column in settings_of(CASES[name])))
    told = kept_probabilities(LOGITS[None], settings, True)[0].numpy()
    np.testing.assert_allclose(told, probabilities(CASES[name]), atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("walks", ["offset", "seed"])
def test_draws_follow_the_filtered_distribution(name, walks):
    start = {"offset": 0, "seed": 7 * 2**40}[walks]
    tokens = drawn(CASES[name], **{walks: torch.arange(start, start + DRAWS)})
    assert p_value(np.bincount(tokens, minlength=LOGITS.numel()), DRAWS * probabilities(CASES[name])) > 1e-3


def test_a_distribution_that_is_slightly_off_fails():
    tokens = drawn(offset=torch.arange(DRAWS))
    assert p_value(np.bincount(tokens, minlength=LOGITS.numel()), DRAWS * probabilities({"temperature": 1.03})) < 1e-3


PAIRS = {
    "offsets": lambda i: ({"offset": i}, {"offset": i + 1}),
    "far-offsets": lambda i: ({"offset": i}, {"offset": i + 2**32}),
    "seeds": lambda i: ({"seed": i}, {"seed": i + 1}),
    "high-seed-words": lambda i: ({"seed": i}, {"seed": i + 2**32}),
    "seed-and-offset-swapped": lambda i: ({"seed": i, "offset": i * 0 + 3}, {"seed": i * 0 + 3, "offset": i}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_draws_are_independent_across(name):
    first, second = (drawn(**columns) for columns in PAIRS[name](torch.arange(DRAWS) * 2))
    assert is_independent(first, second)


def test_rows_of_a_batch_are_independent():
    tokens = drawn(seed=torch.arange(DRAWS) // 2 + 10**6, offset=torch.arange(DRAWS) % 2)
    assert is_independent(tokens[:-1:2], tokens[1::2])
    assert not is_independent(tokens[::2], tokens[::2]), "the test can tell"


def is_independent(first, second):
    likely = slice(0, 8)  # cells of which every one is expected often enough
    p = probabilities({})[likely]
    table = np.zeros((LOGITS.numel(), LOGITS.numel()), int)
    np.add.at(table, (first, second), 1)
    expected = np.outer(p, p) * first.size
    inside = table[likely, likely]
    cells = np.append(inside.flatten(), first.size - inside.sum())
    wanted = np.append(expected.flatten(), first.size - expected.sum())
    return p_value(cells, wanted) > 1e-3
