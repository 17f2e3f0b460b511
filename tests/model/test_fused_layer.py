"""The layer of few kernels computes what the plain layer does."""

from __future__ import annotations

import pytest
import torch

from mstar.kernels import rope
from mstar.kernels.linear import PackedLinear
from mstar.kernels.paged_attention import paged_prefill_reference
from mstar.model.decoder import DecoderLayer
from mstar.model.layers.attention import Attention
from mstar.model.layers.fused import FusedDecoderLayer, fold_norm
from mstar.model.layers.mlp import GatedMLP
from mstar.model.layers.norm import HeadNorm, RMSNorm

HIDDEN, INNER, HEADS, KV_HEADS, DIM, PAGE = 64, 96, 4, 2, 16, 4

DEVICES = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float16),  # Triton's interpreter has no bfloat16 products
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)


class OneRow:
    """Attention and positions of one row of ``n`` new tokens, whose keys and values are stored as they come."""

    def __init__(self, n: int, like: torch.Tensor) -> None:
        pages = -(-n // PAGE)
        self.layer = like.new_zeros(pages + 1, 2, PAGE, KV_HEADS, DIM)
        self.key_index = torch.tensor([(1 + i // PAGE) * 2 * PAGE + i % PAGE for i in range(n)], device=like.device)
        on_device = {"dtype": torch.int32, "device": like.device}
        self._plan = (
            torch.arange(1, pages + 1, **on_device)[None],
            torch.zeros(1, **on_device),
            torch.tensor([n], **on_device),
            torch.tensor([0, n], **on_device),
        )
        frequencies = 100.0 ** -(torch.arange(DIM // 2, device=like.device) / (DIM // 2))
        tables = rope.cos_sin(torch.arange(n, device=like.device), frequencies, interleave=False)
        self._tables = tuple(table.to(like.dtype) for table in tables)

    def next_layer(self):
        return self.layer, self.key_index

    def tables(self):
        return self._tables

    def rotate_heads(self, x):
        return rope.rotate_reference(x, *self._tables, interleave=False)

    def attend(self, q, k, v):
        flat = self.layer.view(-1, KV_HEADS, DIM)
        flat[self.key_index], flat[self.key_index + PAGE] = k, v
        return self.attend_stored(q)

    def attend_stored(self, q):
        return paged_prefill_reference(q, self.layer, *self._plan)

    def last_rows(self, x):
        return x[-1:]


def parts(like: torch.Tensor, *, qk_norm: bool, bias: bool):
    """The parts of a layer; equal in every call."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(like)

    def linear(outputs: int, inputs: int) -> PackedLinear:
        weight = random(outputs, inputs, scale=inputs**-0.5)
        return PackedLinear(weight, random(outputs, scale=0.1) if bias else None, backend="torch")

    def norm() -> RMSNorm:
        return RMSNorm(1 + random(HIDDEN, scale=0.3), 1e-5)

    heads = HEADS + KV_HEADS
    return (
        norm(),
        Attention(
            linear((heads + KV_HEADS) * DIM, HIDDEN),
            linear(HIDDEN, HEADS * DIM),
            HEADS,
            KV_HEADS,
            DIM,
            HeadNorm(1 + random(heads, DIM, scale=0.3), 1e-6) if qk_norm else None,
        ),
        norm(),
        GatedMLP(linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER)),
    )


@DEVICES
@pytest.mark.parametrize(("qk_norm", "bias"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("n", "only_last"), [(1, False), (7, False), (7, True)])
def test_it_computes_what_the_plain_layer_does(device, dtype, qk_norm, bias, n, only_last):
    if torch.cuda.is_available() != (device == "cuda"):
        pytest.skip("the interpreter where there is no GPU, else the GPU")
    x = torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    wanted_row, row = OneRow(n, x), OneRow(n, x)
    plain = DecoderLayer(*parts(x, qk_norm=qk_norm, bias=bias))
    fused = FusedDecoderLayer(*parts(x, qk_norm=qk_norm, bias=bias))
    residual, delta = plain(x.clone(), None, wanted_row, wanted_row, only_last)
    got, nothing = fused(x.clone(), None, row, row, only_last)
    assert nothing is None
    tolerance = {"rtol": 2e-2, "atol": 2e-2 if dtype == torch.float16 else 8e-2}
    torch.testing.assert_close(got, residual + delta, **tolerance)
    torch.testing.assert_close(row.layer, wanted_row.layer, **tolerance)


def test_a_norm_goes_into_the_weight_behind_it_but_for_float16():
    for dtype, is_folded in ((torch.bfloat16, True), (torch.float16, False)):
        weight, norm = torch.randn(6, 4).to(dtype), RMSNorm(torch.randn(4).to(dtype), 1e-5)
        linear = PackedLinear(weight.clone(), backend="torch")
        left = fold_norm(norm, linear)
        assert (left is None) is is_folded
        wanted = (weight.float() * norm.weight.float()).to(dtype) if is_folded else weight
        assert torch.equal(linear.weight, wanted)
