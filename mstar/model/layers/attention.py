"""The attention block around the engine's resources."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mstar.kernels.linear import PackedLinear
from mstar.model.layers.norm import HeadNorm


class Attention(nn.Module):
    """Fused query/key/value projection, optional norm per head, rotary positions, paged attention.

    Queries and keys lie side by side, so one norm and one rotation serve both.
    """

    def __init__(
        self,
        qkv: PackedLinear,
        out: PackedLinear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm: HeadNorm | None = None,
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.qk_norm = qkv, out, qk_norm
        self.num_heads, self.num_qk_heads, self.head_dim = num_heads, num_heads + num_kv_heads, head_dim

    def forward(self, x: torch.Tensor, attn: Any, rope: Any) -> torch.Tensor:
        """Attended heads [n, num_heads * head_dim] of ``x`` [n, hidden]; ``out`` is the caller's to apply.

        ``attn`` and ``rope`` are the planned resources of the step; which layer this is, ``attn`` counts itself.
        """
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        qk, v = heads[:, : self.num_qk_heads], heads[:, self.num_qk_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rope.rotate_heads(qk)
        return attn.attend(qk[:, : self.num_heads], qk[:, self.num_heads :], v).flatten(1)
