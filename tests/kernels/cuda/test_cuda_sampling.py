"""The draw on a device gives the reference's tokens, whatever the settings, and moves the state it is told to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from philox_vectors import WORDS
from sampling_rows import rows_of

from mstar.kernels import sampling
from mstar.kernels.philox import philox_words
from mstar.kernels.sampling import RowSettings

triton = pytest.importorskip("triton")
tl = triton.language

from mstar.kernels.cuda.sampling import DeviceSampler  # noqa: E402
from mstar.kernels.cuda.sampling_rules import fixed_mass, neg_log_noise, philox_word  # noqa: E402

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
    {"top_k": 600, "top_p": 0.9},
    {"top_k": 900},
    {"top_k": 700, "top_p": 0.9, "top_p_first": True, "temperature": 2.0},
]


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")(test))


def mixed_rows(n, offset=0):
    return rows_of(*(KINDS[i % len(KINDS)] | {"seed": i % 64 * 2**57 - i, "offset": offset + i} for i in range(n)))


def on(device, settings):
    return RowSettings(*(column.to(device) for column in settings))


def assert_equals_the_reference(device, logits, rows, apply_filters=True, is_constrained=False, times=1):
    sampler = DeviceSampler(device, logits.shape[0])
    given = (logits.to(device), on(device, rows), apply_filters)
    expected = sampling.sample_rows(logits, rows, apply_filters, is_constrained=is_constrained)
    for _ in range(times):
        tokens, faults = sampler(*given, is_constrained=is_constrained)
        assert tokens.tolist() == expected[0].tolist()
        assert faults.tolist() == expected[1].tolist()
    return expected


@pytest.mark.parametrize(("vocab", "scale"), [(1, 1.0), (97, 3.0), (600, 5.0), (3001, 1.0)])
def test_mixed_rows_equal_the_reference(device, vocab, scale):
    logits = torch.randn(len(KINDS), vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    assert_equals_the_reference(device, logits, mixed_rows(len(KINDS)))


def test_what_the_kernels_count_with_is_left_as_it_was(device):
    logits = torch.randn(3, 1200, generator=torch.Generator().manual_seed(0))
    rows = rows_of({}, {"top_p": 0.9}, {"top_k": 600})
    assert_equals_the_reference(device, logits, rows, times=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_cuts_of_flat_rows_equal_the_reference(device, dtype):
    """Lists that overflow, cuts among many tokens, and cuts of what another cut has left."""
    kinds = [
        {"top_k": 1000, "top_p": 0.9},
        {"top_k": 1000, "top_p": 0.9, "top_p_first": True},
        {"top_k": 1500, "top_p": 0.5},
        {"top_k": 1024, "temperature": 1e-3},
        {"top_k": 1500},
        {"top_p": 0.9, "top_p_min_keep": 1700},
        {"top_k": 2500, "top_p": 0.9, "temperature": 50.0},
    ]
    logits = torch.randn(len(kinds), 5000, generator=torch.Generator().manual_seed(7)).to(dtype)
    assert_equals_the_reference(device, logits, rows_of(*(kind | {"offset": i} for i, kind in enumerate(kinds))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_nuclei_of_flat_rows_equal_the_reference(device, dtype):
    """Some winners of the whole row lie outside."""
    kinds = [{"top_p": p, "temperature": t} for p in (0.77, 0.8, 0.9, 0.95, 0.9999999) for t in (0.7, 1.0, 40.0)]
    logits = torch.randn(len(kinds), 2500, generator=torch.Generator().manual_seed(15)).to(dtype)
    rows = rows_of(*(kind | {"seed": i, "offset": i * 5} for i, kind in enumerate(kinds)))
    expected, _ = assert_equals_the_reference(device, logits, rows)
    of_whole_rows, _ = sampling.sample_rows(logits, rows, apply_filters=False)
    assert (expected != of_whole_rows).any()


@pytest.mark.parametrize("temperature", [0.25, 1.0])
def test_a_nucleus_is_of_what_min_p_leaves(device, temperature):
    kinds = [{"top_p": 0.8, "min_p": 0.3}, {"top_p": 0.8, "min_p": 0.1, "top_k": 90, "top_p_first": True}]
    logits = torch.randn(40, 1500, generator=torch.Generator().manual_seed(10))
    rows = [kinds[i % 2] | {"temperature": temperature, "seed": i, "offset": i} for i in range(40)]
    assert_equals_the_reference(device, logits, rows_of(*rows))


def test_a_nucleus_that_ends_between_equal_tokens_equals_the_reference(device):
    """The mass above the winner is that of the nucleus but for rounding: sums in float32 do not tell."""
    logits = torch.full((40, 1500), -1.5)
    logits[:, ::2] = 0.0
    edge = np.float32(1 / (1 + np.exp(-1.5)))  # of the mass lies above the tokens of -1.5
    shares = [np.nextafter(edge, np.float32(i % 2)) for i in range(40)]
    rows = [{"top_p": float(share), "seed": i, "offset": i} for i, share in enumerate(shares)]
    expected, _ = assert_equals_the_reference(device, logits, rows_of(*rows))
    assert (expected % 2 == 1).any()


def test_a_top_k_past_the_vocabulary_leaves_the_nucleus_to_decide(device):
    logits = torch.randn(8, 600, generator=torch.Generator().manual_seed(8))
    rows = rows_of(*({"top_k": 700, "top_p": 0.9, "offset": i} for i in range(8)))
    assert_equals_the_reference(device, logits, rows)


@on_gpu
@pytest.mark.parametrize("vocab", [6562, 16384, 49152, 151936, 262144])
@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_mixed_rows_equal_the_reference(vocab, scale, dtype):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(60, vocab, generator=generator) * scale).to(dtype)
    assert_equals_the_reference(torch.device("cuda"), logits, mixed_rows(60))


@on_gpu
def test_many_offsets_equal_the_reference():
    logits = torch.randn(150, 5000, generator=torch.Generator().manual_seed(3)) * 3
    for offset in range(0, 2**34, 2**34 // 20):
        assert_equals_the_reference(torch.device("cuda"), logits, mixed_rows(150, offset))


def test_without_filters_top_k_and_top_p_are_ignored(device):
    logits = torch.randn(len(KINDS), 200, generator=torch.Generator().manual_seed(2))
    assert_equals_the_reference(device, logits, mixed_rows(len(KINDS)), apply_filters=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strided_rows_equal_the_reference(device, dtype):
    """Many ties: a cut keeps all of them."""
    logits = torch.randn(1500, len(KINDS), generator=torch.Generator().manual_seed(4)).to(dtype)
    assert_equals_the_reference(device, logits.T, mixed_rows(len(KINDS)))


@pytest.mark.parametrize("kind", ["flat", "steps", "one-hot", "barred", "far"])
def test_odd_distributions_equal_the_reference(device, kind):
    rows = [
        {"top_k": 40},
        {"top_p": 0.5},
        {"top_k": 900, "top_p": 0.5},
        {"top_k": 50, "top_p": 0.9, "top_p_first": True},
        {"top_p": 0.3, "top_p_min_keep": 1200},
        {"min_p": 0.5},
    ]
    logits = torch.zeros(len(rows), 2100)
    if kind == "steps":
        logits[:, ::7] = 1.0
    elif kind == "one-hot":
        logits[:, 2050] = 50.0
    elif kind == "barred":
        logits[:] = -torch.inf
        logits[:, 1000:1005] = torch.tensor([-7.0, -8.0, -1e30, -7.0, -7.5])
    elif kind == "far":
        logits[:] = torch.linspace(0, -80, 2100)
        logits[:, 100:200] = -1e30
    assert_equals_the_reference(device, logits, rows_of(*(row | {"offset": i} for i, row in enumerate(rows))))


@pytest.mark.parametrize("seed", range(3))
def test_any_settings_and_ties_equal_the_reference(device, seed):
    random = np.random.default_rng(seed)
    values = np.array([*range(-8, 9), -np.inf, -1e30, -200.0, 1e-7, -0.0])
    rows = [
        {
            "temperature": float(random.choice([1e-45, 0.3, 1.0, 2.5, 3e38])),
            "top_k": int(random.integers(0, 40)),
            "top_p": float(random.choice([1e-9, 0.05, 0.25, 0.5, 0.75, 0.97, 1.0])),
            "min_p": float(random.choice([0.0, 0.013, 0.27, 1.0])),
            "top_p_first": bool(random.integers(2)),
            "top_p_min_keep": int(random.integers(1, 6)),
            "seed": int(random.integers(-(2**63), 2**63 - 1)),
            "offset": int(random.integers(0, 2**63 - 1)),
        }
        for _ in range(24)
    ]
    logits = torch.from_numpy(random.choice(values, (len(rows), int(random.integers(2, 70))))).float()
    assert_equals_the_reference(device, logits, rows_of(*rows))


@pytest.mark.parametrize("row", [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5}])
def test_faults_are_the_references_and_leave_others_alone(device, row):
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(0))
    logits[0, 29], logits[2], logits[3, 4] = torch.nan, -torch.inf, torch.inf
    logits[4, :60] = -torch.inf
    logits[5, 7], logits[5, 8] = -torch.nan, torch.inf
    for is_constrained in (False, True):
        faults = assert_equals_the_reference(device, logits, rows_of(*[row] * 6), is_constrained=is_constrained)[1]
        assert faults.tolist() == [1, 0, 2 if is_constrained else 1, 1, 0, 1]


def test_a_row_does_not_depend_on_its_neighbours(device):
    logits, rows = torch.randn(6, 700, generator=torch.Generator().manual_seed(1)) * 2, mixed_rows(6)
    together = DeviceSampler(device, 6)(logits.to(device), on(device, rows), True)[0].tolist()
    for i in range(6):
        alone = RowSettings(*(column[i : i + 1] for column in on(device, rows)))
        assert DeviceSampler(device, 1)(logits[i : i + 1].to(device), alone, True)[0].tolist() == together[i : i + 1]


def test_known_sequence(device):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(12, 4).contiguous().to(device)
    rows = on(device, rows_of(*({"offset": i} for i in range(12))))
    assert DeviceSampler(device, 12)(logits, rows, True)[0].tolist() == [1, 1, 1, 2, 2, 0, 0, 0, 0, 1, 2, 0]


def test_state_moves_at_each_rows_place(device):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(device)
    offsets, last = torch.arange(6, device=device) * 10, torch.arange(6, device=device) + 100
    index, overwritten = torch.tensor([4, 0, 5], device=device), torch.zeros(3, dtype=torch.int64, device=device)
    rows = on(device, rows_of({}, {"temperature": 0.0}, {"top_k": 5}))._replace(offset=offsets)
    sampler = DeviceSampler(device, 3)
    for draw in range(2):
        expected = sampling.sample_rows(
            logits.cpu(), RowSettings(*(c.cpu() for c in rows._replace(offset=offsets[index]))), True
        )[0]
        before = last[index].tolist()
        tokens, _ = sampler(logits, rows, True, index=index, advances=True, last_tokens=last, overwritten=overwritten)
        assert tokens.tolist() == expected.tolist()
        assert overwritten.tolist() == before
        assert offsets.tolist() == [1 + draw, 10, 20, 30, 41 + draw, 51 + draw]
        assert last.tolist() == [tokens[1].item(), 101, 102, 103, tokens[0].item(), tokens[2].item()]


def test_state_of_the_step_itself_moves_in_place(device):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(device)
    rows = on(device, rows_of({"offset": 3}, {"temperature": 0.0}, {"top_p": 0.5}))
    last = torch.zeros(3, dtype=torch.int64, device=device)
    tokens, _ = DeviceSampler(device, 3)(logits, rows, True, advances=True, last_tokens=last)
    assert rows.offset.tolist() == [4, 1, 1]
    assert last.tolist() == tokens.tolist()
    tokens, _ = DeviceSampler(device, 3)(logits, rows, True)
    assert rows.offset.tolist() == [4, 1, 1], "left alone unless told"


@triton.jit
def _rules_kernel(scores, masses, tokens, words, noise, seed_of, offset_of, N: tl.constexpr):
    lane = tl.arange(0, N)
    seed, offset, token = tl.load(seed_of), tl.load(offset_of), tl.load(tokens + lane)
    tl.store(masses + lane, fixed_mass(tl.load(scores + lane)))
    tl.store(words + lane, philox_word(seed, offset, token).to(tl.int64))
    tl.store(noise + lane, neg_log_noise(seed, offset, token))


@pytest.mark.parametrize(("seed", "offset", "token", "word"), [*WORDS, (-1, 2**63 - 1, 2**31 - 5000, None)])
def test_masses_and_words_have_the_references_bits(device, seed, offset, token, word):
    n = 4096
    generator = torch.Generator().manual_seed(token)
    scores = -torch.rand(n, generator=generator) * 45
    scores[:8] = torch.tensor([0.0, -1e-8, -43.0, -44.0, -torch.inf, -28.4, -0.34657359, -1e-30])
    tokens = torch.arange(n, dtype=torch.int32) + token
    masses, words = (torch.zeros(n, dtype=torch.int64, device=device) for _ in range(2))
    noise = torch.zeros(n, device=device)
    _rules_kernel[(1,)](
        scores.to(device), masses, tokens.to(device), words, noise, torch.tensor([seed], device=device),
        torch.tensor([offset], device=device), N=n, enable_fp_fusion=False,
    )  # fmt: skip
    assert masses.tolist() == sampling.fixed_mass(scores).tolist()
    seeds, offsets, ids = np.full(n, seed), np.full(n, offset), tokens.numpy()
    assert words.tolist() == philox_words(seeds, offsets, ids).tolist()
    assert word is None or words[0] == word
    expected = sampling.neg_log_noise(seeds, offsets, ids)
    np.testing.assert_allclose(noise.cpu(), expected, rtol=5e-7, atol=5e-7)
