"""Token embeddings, with a table of their own or the head's."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from mstar.kernels.linear import PackedLinear


class Embedding(nn.Module):
    """Rows of a table [vocabulary, hidden]."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class TiedEmbedding(nn.Module):
    """Rows of the head's weight, so that a tied table is in memory once."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.head = head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head.weight_rows(ids)
