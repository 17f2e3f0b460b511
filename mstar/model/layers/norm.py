"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from mstar.kernels.row_ops import add_rms_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (https://arxiv.org/abs/1910.07467)."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of ``x`` [n, hidden], to which ``delta`` [n, hidden] is added in place first."""
        return add_rms_norm(x, delta, self.weight, self.eps)


class HeadNorm(nn.Module):
    """Root-mean-square norm of every head by itself: x [n, heads, head_dim], ``weight`` [heads, head_dim]."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape[-1:], None, self.eps).mul_(self.weight)
