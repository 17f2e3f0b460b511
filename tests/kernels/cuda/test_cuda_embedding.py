"""Embedding rows of last tokens, by the kernel and by its reference."""

import pytest
import torch

from mstar.kernels import embedding

cuda = pytest.importorskip("mstar.kernels.cuda.embedding")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [576, 1024, 7])
def test_rows_are_those_of_the_tokens_at_the_index(device, dtype, hidden):
    generator = torch.Generator().manual_seed(hidden)
    weight = torch.randn(60, hidden, generator=generator).to(device, dtype)
    last_token = torch.randint(60, (9,), generator=generator).to(device)
    index = torch.tensor([8, 0, 3, 3], device=device)
    expected = embedding.embed_rows(weight, last_token, index)
    ids, x = cuda.embed_rows(weight, last_token, index)
    assert ids.tolist() == expected[0].tolist() == last_token[index].tolist()
    assert torch.equal(x, expected[1])
