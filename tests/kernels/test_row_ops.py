"""The fused row operators equal their torch forms, whatever the batch and the number of threads."""

import pytest
import torch

from mstar.kernels.row_ops import add_rms_norm, add_rms_norm_reference, silu_mul, silu_mul_reference

ROWS, DIMS = [1, 3, 32, 70], [16, 576, 100]  # 100 fills no vectors: torch's form runs


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("has_delta", [True, False])
def test_norm_adds_in_place_and_equals_torch(rows, dim, has_delta):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, dim) * 3, torch.randn(dim)
    delta = torch.randn(rows, dim) if has_delta else None
    wanted_x = x.clone()
    wanted = add_rms_norm_reference(wanted_x, delta, weight, 1e-5)
    torch.testing.assert_close(add_rms_norm(x, delta, weight, 1e-5), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(x, wanted_x)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", DIMS)
def test_swiglu_equals_torch(rows, dim):
    torch.manual_seed(0)
    gate_up = torch.randn(rows, 2 * dim) * 10
    gate_up[0, :4] = torch.tensor([0.0, 80.0, -80.0, -1e4])
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), rtol=1e-5, atol=1e-6)


def test_sixteen_bit_rows_take_torchs_form():
    x, weight = torch.randn(2, 64).bfloat16(), torch.ones(64).bfloat16()
    assert torch.equal(add_rms_norm(x.clone(), x, weight, 1e-5), add_rms_norm_reference(x.clone(), x, weight, 1e-5))
    assert torch.equal(silu_mul(x), silu_mul_reference(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_out_as_in_torch(bad):
    x = torch.randn(3, 64)
    x[1, 5] = bad
    x[1, 40] = 2.0
    torch.testing.assert_close(silu_mul(x), silu_mul_reference(x), equal_nan=True)
    normed = add_rms_norm(x.clone(), None, torch.ones(64), 1e-5)
    torch.testing.assert_close(normed, add_rms_norm_reference(x, None, torch.ones(64), 1e-5), equal_nan=True)


def test_a_row_depends_neither_on_its_neighbours_nor_on_threads():
    torch.manual_seed(0)
    x, weight, before = torch.randn(64, 576), torch.randn(576), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        normed, gated = add_rms_norm(x, None, weight, 1e-5), silu_mul(x)
        torch.set_num_threads(1)
        for row in (0, 31, 32, 63):
            assert torch.equal(add_rms_norm(x[row : row + 1], None, weight, 1e-5), normed[row : row + 1])
            assert torch.equal(silu_mul(x[row : row + 1]), gated[row : row + 1])
    finally:
        torch.set_num_threads(before)
