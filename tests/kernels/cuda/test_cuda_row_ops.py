"""The GPU's row operators equal torch's forms."""

import pytest
import torch

pytest.importorskip("triton")

from linear_cases import assert_near, random

from mstar.kernels import row_ops
from mstar.kernels.cuda.row_ops import add_rms_norm, rms_norm, silu_mul
from mstar.kernels.row_ops import add_rms_norm_reference, silu_mul_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dim", [16, 100, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_adds_in_place(rows, dim, dtype, device):
    torch.manual_seed(0)
    x, delta = (random(rows, dim, device=device, dtype=dtype, scale=3.0) for _ in range(2))
    weight = random(dim, device=device, dtype=dtype)
    total = x + delta
    wanted = add_rms_norm_reference(total.float(), None, weight.float(), 1e-5)
    assert_near(rms_norm(total, weight, 1e-5), wanted)
    unweighted = add_rms_norm_reference(total.float(), None, torch.ones_like(weight).float(), 1e-5)
    assert_near(rms_norm(total, None, 1e-5), unweighted)
    assert_near(add_rms_norm(x, delta, weight, 1e-5), wanted)
    assert_near(x, total)  # the interpreter rounds bfloat16 towards zero


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_models_norm_on_a_gpu_is_this_one():
    device = torch.device("cuda")
    x, delta = (random(3, 576, device=device, dtype=torch.bfloat16, scale=3.0) for _ in range(2))
    weight, total = random(576, device=device, dtype=torch.bfloat16), x.clone()
    wanted = add_rms_norm(total, delta, weight, 1e-5)
    assert torch.equal(row_ops.add_rms_norm(x, delta, weight, 1e-5), wanted)
    assert torch.equal(x, total)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dim", [16, 100, 1536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(rows, dim, dtype, device):
    torch.manual_seed(0)
    gate_up = random(rows, 2 * dim, device=device, dtype=dtype, scale=4.0)
    assert_near(silu_mul(gate_up), silu_mul_reference(gate_up.float()))
    x, bias = (random(*size, device=device, dtype=dtype) for size in ((rows, 48), (2 * dim,)))
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    wanted = silu_mul_reference(gate_up.float() * scale + bias.float())
    assert_near(silu_mul(gate_up, normed_x=x, eps=1e-5, bias=bias), wanted)
