"""Masks of a bit per token on the device, against the form in torch operators."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.grammar.masks import bar_rows, num_words

pytest.importorskip("triton")
from mstar.kernels.cuda import bitmask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [31, 32, 33, 1000, 4100])
def test_rows_with_a_mask_lose_what_it_bars_and_others_keep_their_bits(device, vocab, dtype):
    rng = np.random.default_rng(vocab)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (3, num_words(vocab)), dtype=np.int64).astype(np.int32))
    words[1], words[2] = 0, -1
    mask_of = torch.tensor([2, -1, 0, 1, 0], dtype=torch.int32)
    x = torch.randn(5, vocab).to(dtype)
    x[1, 3] = torch.nan
    wanted = x.clone()
    bar_rows(wanted, words, mask_of)
    x = x.to(device)
    bitmask.bar_rows(x, words.to(device), mask_of.to(device))
    np.testing.assert_array_equal(x.float().cpu().numpy(), wanted.float().numpy())
    assert torch.isneginf(x[3]).all()
