"""Penalties and floors on the device: the bits of `kernels/penalties.py`, and nothing of rows that look at nothing."""

import numpy as np
import pytest
import torch

from mstar.kernels import penalties as reference

pytest.importorskip("triton")
from mstar.kernels.cuda import penalties

VOCAB = 5000
PENALTIES = np.float32([1.3, 0.5, 1.0, 3.0, reference.LEAST_FACTOR, reference.MOST_FACTOR])


def logits(rows, device, vocab=VOCAB):
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 5
    x[:, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-38, reference.MOST_FACTOR, -1e38])
    return x.to(device)


def addresses(tensors, device):
    return torch.tensor([0 if each is None else each.data_ptr() for each in tensors], device=device)


def assert_same_bits(got, wanted):
    assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))


def test_what_was_seen_is_penalised_with_the_references_bits(device):
    x, rng = logits(len(PENALTIES) + 1, device), np.random.default_rng(0)
    seen = torch.from_numpy(rng.random((len(PENALTIES) + 1, VOCAB)) < 0.3).to(device)
    seen[:, :8] = True
    seen[-1] = False
    penalty = torch.from_numpy(np.append(PENALTIES, np.float32(2))).to(device)
    wanted = reference.presence_penalty(x.clone(), seen, penalty)
    penalties.presence_penalty(x, addresses([*seen[:-1], None], device), penalty)
    assert_same_bits(x, wanted)


@pytest.mark.parametrize("window", [1, 3, 64, 65, 200])
def test_a_window_is_penalised_with_the_references_bits(device, window):
    rows = len(PENALTIES) + 1
    x, rng = logits(rows, device), np.random.default_rng(window)
    rings = [torch.from_numpy(rng.integers(-1, 12, window).astype(np.int32)).to(device) for _ in range(rows)]
    penalty = torch.from_numpy(np.append(PENALTIES, np.float32(2))).to(device)
    recent = torch.stack(rings).long()
    recent[-1] = -1
    wanted = reference.window_penalty(x.clone(), recent, penalty)
    lengths = torch.full((rows,), window, dtype=torch.int32, device=device)
    penalties.window_penalty(x, addresses([*rings[:-1], None], device), lengths, penalty, 200)
    assert_same_bits(x, wanted)


@pytest.mark.parametrize("num_ids", [1, 3, 40])
def test_the_floor_bars_stop_ids_but_never_the_last_tokens_left(device, num_ids):
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(num_ids))[:num_ids].to(device)
    others = torch.tensor([i for i in (0, 1500, VOCAB - 1) if i not in set(ids.tolist())])
    x = torch.full((6, VOCAB), -torch.inf, device=device)
    x[:, ids] = 1.0
    x[2, others[0]], x[3, others[1]], x[4, others[-1]] = -1e30, 0.0, 2.0
    x[5] = torch.randn(VOCAB)
    offset, least = torch.tensor([[0, 4, 0, 4, 4, 5], [5, 5, 5, 5, 5, 5]], device=device)
    wanted = reference.length_floor(x.clone(), ids, offset < least)
    penalties.length_floor(x, ids.int(), offset, least)
    assert torch.equal(x, wanted)
    assert torch.isfinite(x[0, ids]).all()
    assert not torch.isfinite(x[2:5, ids]).any()


def test_draws_are_recorded_where_a_row_has_memory_and_what_they_wrote_over_is_told(device):
    seen = torch.zeros(2, VOCAB, dtype=torch.bool, device=device)
    seen[1, 9] = True
    rings = torch.full((2, 4), -1, dtype=torch.int32, device=device)
    rings[1, 3] = 77
    tokens, offset = torch.tensor([5, 9, 11, 12, 13], device=device), torch.tensor([0, 6, 5, 7, 8], device=device)
    window = torch.tensor([0, 0, 4, 4, 4], dtype=torch.int32, device=device)
    before = penalties.record_draws(
        tokens,
        offset,
        addresses([seen[0], seen[1], None, None, None], device),
        addresses([None, None, rings[0], rings[1], None], device),
        window,
    )
    assert [torch.nonzero(row).flatten().tolist() for row in seen] == [[5], [9]]
    assert rings.tolist() == [[-1, 11, -1, -1], [-1, -1, -1, 12]]
    assert before[0].tolist() == [0, 1, 0, 0, 0]
    assert before[1, 2:4].tolist() == [-1, 77]
    assert before[2, 2:4].tolist() == [1, 3]
