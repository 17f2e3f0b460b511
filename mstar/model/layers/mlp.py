"""The gated feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from mstar.kernels.linear import PackedLinear
from mstar.kernels.row_ops import silu_mul


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up in one projection (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x)))
