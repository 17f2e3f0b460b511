"""Inputs of the projections' tests, what they are held against, and products of bfloat16 in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mstar.kernels.rope import cos_sin
from mstar.kernels.rope_frequencies import inverse_frequencies

PAGE_SIZE = 4


@dataclass
class Heads:
    """What comes behind a q/k/v projection: tables of the rows' positions, a layer of the cache, and where to store."""

    cos: torch.Tensor
    sin: torch.Tensor
    key_index: torch.Tensor
    layer: torch.Tensor

    @classmethod
    def of(cls, rows: int, kv_heads: int, head_dim: int, rotary_dim: int, like: torch.Tensor) -> Heads:
        frequencies = inverse_frequencies(rotary_dim, 10_000.0, None)
        cos, sin = cos_sin(torch.randint(0, 500, (rows,)), frequencies, False)
        pages = 2 + rows // PAGE_SIZE
        layer = torch.zeros(pages, 2, PAGE_SIZE, kv_heads, head_dim).to(like)
        slots = torch.randperm(pages * PAGE_SIZE)[:rows]
        key_index = slots // PAGE_SIZE * 2 * PAGE_SIZE + slots % PAGE_SIZE
        return cls(cos.to(like.device), sin.to(like.device), key_index.to(like.device), layer)


def random(*shape: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    made = (torch.randn(*shape) * scale).to(device, dtype)
    if device.type == "cuda":
        torch.cuda.synchronize()  # kernels read weights before the kernels in front of them have ended
    return made


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """`wanted` in float32 of the same inputs: `got` is off by its own rounding and one of `x` times the norm."""
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def teach_interpreter_bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as its bits, and multiplies those."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def values(handle):
        if handle.data.dtype == np.uint16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return TensorHandle(np.matmul(values(a), values(b)) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
