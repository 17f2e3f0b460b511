"""Token embeddings, with a table of their own or the head's."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from mstar.kernels import embedding
from mstar.kernels.linear import PackedLinear


class Embedding(nn.Module):
    """Rows of a table [vocabulary, hidden]."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)

    def of_last(self, last_token: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The embeddings [rows, hidden] of ``last_token`` int64 [any] at ``index`` int64 [rows]."""
        return _rows_at(self.weight, last_token, index)


class TiedEmbedding(nn.Module):
    """Rows of the head's weight, so that a tied table is in memory once."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.head = head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head.weight_rows(ids)

    def of_last(self, last_token: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """As :meth:`Embedding.of_last`."""
        if self.head.backend == "torch":
            return _rows_at(self.head.weight, last_token, index)
        return self.head.weight_rows(last_token.index_select(0, index))


def _rows_at(weight: torch.Tensor, last_token: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if weight.is_cuda:
        from mstar.kernels.cuda.embedding import embed_rows  # needs Triton

        return embed_rows(weight, last_token, index)[1]
    return embedding.embed_rows(weight, last_token, index)[1]
