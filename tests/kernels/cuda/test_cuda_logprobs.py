"""What the device tells of a position, against the reference."""

import pytest
import torch

from mstar.kernels import logprobs as reference

pytest.importorskip("triton")
from mstar.kernels.cuda import logprobs

WIDTH = 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "scale"), [(4, 1), (1000, 30), (8192, 4), (20000, 4)])
def test_told_numbers_are_the_references(device, vocab, scale, dtype):
    x = torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    x[1] += 1e4
    x[2, ::2] = -torch.inf
    x[3] = 1.0  # ties
    x[4] = -torch.inf
    x[5, : vocab - 1] = -torch.inf
    x[6, :3] = torch.tensor([-0.0, 0.0, 3e30])
    x = x.to(dtype)
    tokens, num_top = torch.tensor([0, 1, 2, 3, 3, vocab - 1, 2, 1]), torch.tensor([5, 5, 3, 5, 2, 5, 0, -1])
    wanted = reference.tell(x.float(), tokens, num_top, WIDTH, WIDTH)
    told = logprobs.tell(x.to(device), tokens.to(device), num_top.to(device), WIDTH)
    for part, other in zip(told, wanted, strict=True):
        assert part.dtype == other.dtype
        if part.is_floating_point():
            torch.testing.assert_close(part.cpu(), other, rtol=1e-6, atol=2e-6)
        else:
            assert torch.equal(part.cpu(), other)


def test_rows_with_a_nan_or_an_infinite_logit_raise_nothing_and_disturb_no_other(device):
    x = torch.randn(3, 9000)
    wanted = reference.tell(x[2:].clone(), torch.tensor([7]), torch.tensor([5]), WIDTH, WIDTH)
    x[0, 5], x[1, 5] = torch.nan, torch.inf
    told = logprobs.tell(x.to(device), torch.full((3,), 7, device=device), torch.full((3,), 5, device=device), WIDTH)
    assert torch.equal(told.top_ids[2].cpu(), wanted.top_ids[0])
    torch.testing.assert_close(told.logprob[2:].cpu(), wanted.logprob, rtol=1e-6, atol=2e-6)


def test_a_row_is_told_the_same_alone_and_among_others(device):
    x = (torch.randn(3, 9000, generator=torch.Generator().manual_seed(3)) * 5).to(device)
    tokens, num_top = torch.arange(3, device=device), torch.full((3,), 5, device=device)
    together = logprobs.tell(x, tokens, num_top, WIDTH)
    for i in range(3):
        alone = logprobs.tell(x[i : i + 1].clone(), tokens[i : i + 1], num_top[i : i + 1], WIDTH)
        assert all(torch.equal(one[0], every[i]) for one, every in zip(alone, together, strict=True))
