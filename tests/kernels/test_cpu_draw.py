"""The CPU kernel of the draw gives the reference's tokens, whatever the settings, threads and vector width."""

import ctypes
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from philox_vectors import WORDS
from sampling_rows import rows_of

from mstar.kernels import sampling
from mstar.kernels.cpu import draw, jit, race_ir
from mstar.kernels.cpu.ir import IrFunction
from mstar.kernels.cpu.jit import Worker, ir
from mstar.kernels.philox import philox_words
from mstar.kernels.sampling import RowSettings

pytestmark = pytest.mark.skipif(draw.draw_kernel() is None, reason="no draw kernel on this machine")

KINDS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"top_p": 0.95},
    {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "top_p_first": True},
    {"top_k": 1},
    {"temperature": 1.7, "min_p": 0.05},
    {"top_p": 1e-9, "top_p_min_keep": 5},
    {"top_p": 0.9999999, "temperature": 3.0},
    {"top_k": 2**62, "top_p": 0.3, "top_p_min_keep": 2**62},
    {"top_k": 7},
]


def mixed_rows(n, offset=0):
    return rows_of(*(KINDS[i % len(KINDS)] | {"seed": i * 2**57 - i, "offset": offset + i} for i in range(n)))


def assert_equals_the_reference(logits, rows, apply_filters=True):
    tokens, faults = draw.sample_rows(logits, rows, apply_filters)
    expected, expected_faults = sampling.sample_rows(logits, rows, apply_filters)
    assert tokens.tolist() == expected.tolist()
    assert faults.tolist() == expected_faults.tolist()


@pytest.fixture(params=[8, 16])
def kernel(request, monkeypatch):
    """A kernel of either vector width."""
    if request.param > jit.vector_lanes():
        pytest.skip("no AVX-512")
    monkeypatch.setattr(draw, "vector_lanes", lambda: request.param)
    made = draw.DrawKernel()
    monkeypatch.setattr(draw, "draw_kernel", lambda: made)
    return made


@pytest.mark.parametrize("vocab", [1, 3, 1000, 6562, 16384, 49152, 151936])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_mixed_rows_equal_the_reference(kernel, vocab, scale):
    generator = torch.Generator().manual_seed(vocab)
    assert_equals_the_reference(torch.randn(48, vocab, generator=generator) * scale, mixed_rows(48))


@pytest.mark.parametrize("apply_filters", [True, False])
def test_many_offsets_equal_the_reference(apply_filters):
    logits = torch.randn(48, 1000, generator=torch.Generator().manual_seed(3)) * 3
    for offset in range(0, 2**34, 2**34 // 60):
        assert_equals_the_reference(logits, mixed_rows(48, offset), apply_filters)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.sampled_from([*range(-8, 9), -np.inf, -1e30, -200.0, 1e-7]), min_size=1, max_size=70),
    temperature=st.sampled_from([1e-45, 0.3, 1.0, 2.5, 3e38]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1e-9, 0.05, 0.25, 0.5, 0.75, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.27, 1.0]),
    top_p_first=st.booleans(),
    top_p_min_keep=st.integers(1, 5),
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(0, 2**63 - 1),
)
def test_any_settings_and_ties_equal_the_reference(logits, **row):
    assert_equals_the_reference(torch.tensor([logits], dtype=torch.float32), rows_of(row))


@pytest.mark.parametrize("row", KINDS)
def test_flat_one_hot_and_barred_rows_equal_the_reference(kernel, row):
    logits = torch.zeros(40, 3001)
    logits[10:20, 2999] = 50.0
    logits[20:30] = -torch.inf
    logits[20:30, 3000] = -7.0
    logits[30:40, ::7] = 1.0
    assert_equals_the_reference(logits, rows_of(*(row | {"offset": i} for i in range(40))))


def test_faults_and_other_layouts_equal_the_reference():
    logits = torch.randn(1003, 48, generator=torch.Generator().manual_seed(0)).T
    logits[3, 7], logits[4], logits[5, 2] = torch.nan, -torch.inf, torch.inf
    assert_equals_the_reference(logits, mixed_rows(48))
    assert_equals_the_reference(logits.to(torch.bfloat16), mixed_rows(48))


def drawn_over_many_offsets(logits, row):
    n = 3000  # none of the tokens kept is missing then
    tokens, _ = draw.sample_rows(logits.expand(n, -1), rows_of(*(row | {"offset": i} for i in range(n))), True)
    return set(tokens.tolist())


@pytest.mark.parametrize("row", [{"top_p": 0.5}, {"top_p": 0.50001}, {"top_k": 3}, {"top_p": 0.75, "min_p": 0.2}, {}])
def test_the_tokens_that_can_be_drawn_are_those_kept(kernel, row):
    logits = torch.tensor([4.0, 3.0, 2.0, 2.0, 2.0, 3.0, 3.0, 1.0]) * 0.5
    row = row | {"temperature": 0.9}
    scores = sampling.scaled_scores(logits[None], logits.max()[None], torch.tensor([0.9]))
    floor = sampling.keep_floor(scores, rows_of(row), True)
    assert drawn_over_many_offsets(logits, row) == set(torch.nonzero(scores[0] >= floor).flatten().tolist())


def test_known_sequence(kernel):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(12, 4)
    tokens, _ = draw.sample_rows(logits, rows_of(*({"offset": i} for i in range(12))), True)
    assert tokens.tolist() == [1, 1, 1, 2, 2, 0, 0, 0, 0, 1, 2, 0]


def test_a_row_does_not_depend_on_threads_or_neighbours():
    logits, rows = torch.randn(48, 6562, generator=torch.Generator().manual_seed(1)) * 2, mixed_rows(48)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [
            draw.sample_rows(logits[i : i + 1], RowSettings(*(c[i : i + 1] for c in rows)), True)[0].item()
            for i in range(48)
        ]
        for count in (1, 2):
            torch.set_num_threads(count)
            assert draw.sample_rows(logits, rows, True)[0].tolist() == alone
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("margin", [0.7, 12.0])  # some rows with a few candidates; rows with more than are noted
def test_close_candidates_are_decided_by_the_reference_formula(margin, monkeypatch):
    monkeypatch.setattr(race_ir, "MARGIN", margin)
    made = draw.DrawKernel()
    monkeypatch.setattr(draw, "draw_kernel", lambda: made)
    logits = torch.randn(48, 1000, generator=torch.Generator().manual_seed(5))
    for offset in range(20):
        assert_equals_the_reference(logits, mixed_rows(48, offset))


def run_over(words, emit):
    """``emit(function, vector of words)`` for every word, fp32: a kernel of one loop, on one thread."""
    lanes = jit.vector_lanes()
    module = ir.Module()
    f, a = IrFunction.worker(module, lanes, ("source", "target", "n"), frozenset({"source", "target"}))
    with f.loop(0, a["n"], lanes) as (i, _):
        f.store(emit(f, f.vector(a["source"], i, f.ints)), a["target"], i)
    f.b.ret_void()
    out = np.empty(words.size, np.float32)
    Worker(str(module))((ctypes.c_int64 * 3)(words.ctypes.data, out.ctypes.data, words.size), 1)
    return out


def test_noise_is_within_half_the_margin_and_below_its_bound(monkeypatch):
    edges = np.concatenate(
        [np.arange(2**16), 2**32 - 1 - np.arange(2**16), *(2**i + np.arange(-8, 8) for i in range(4, 32))]
    )
    random = np.random.default_rng(0).integers(0, 2**32, 2**20)
    words = np.concatenate([edges, random]).astype(np.uint32)
    monkeypatch.setattr(sampling, "philox_words", lambda *_: words)
    exact = sampling.neg_log_noise(np.zeros(1), np.zeros(1), np.zeros(1))
    got = run_over(words, lambda f, word: race_ir.neg_log_noise(f, race_ir.uniform(f, word)))
    bound = run_over(words, lambda f, word: race_ir.most_noise(f, race_ir.uniform(f, word)))
    assert np.abs(got.astype(float) - exact).max() < race_ir.MARGIN / 2 - 2e-6  # the sum with the score rounds too
    assert (bound > got).all()


@pytest.mark.parametrize(("seed", "offset", "token", "word"), [*WORDS, (-1, 2**63 - 1, 2**31 + 5, None)])
def test_philox_words(seed, offset, token, word):
    tokens = (np.arange(16) + token - token % 16).astype(np.uint32)

    def emit(f, token):
        counter = [f.splat(f.long(offset)), f.splat(f.long(offset >> 32)), f.b.zext(token, f.longs)]
        words = race_ir.philox(f, race_ir.philox_keys(f, f.long(seed)), [*counter, f.fill(0, f.longs)])
        return f.b.bitcast(words, f.floats)

    words = run_over(tokens, emit).view(np.uint32)
    assert words.tolist() == philox_words(np.full(16, seed), np.full(16, offset), tokens).tolist()
    assert word is None or words[token % 16] == word


def test_without_a_kernel_the_reference_draws_and_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(jit, "llvm", None)
    draw.draw_kernel.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert_equals_the_reference(torch.randn(48, 100), mixed_rows(48))
    finally:
        draw.draw_kernel.cache_clear()
    assert len(caplog.records) == 1
    assert "sampling" in caplog.text
