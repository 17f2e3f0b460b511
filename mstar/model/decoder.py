"""The decoder stack shared by the text families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mstar.kernels.linear import PackedLinear
from mstar.model.layers.attention import Attention
from mstar.model.layers.embedding import Embedding, TiedEmbedding
from mstar.model.layers.mlp import GatedMLP
from mstar.model.layers.norm import RMSNorm


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward.  What a block adds to the residual is added by the norm that comes next."""

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = attention_norm, attention, mlp_norm, mlp

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, attn: Any, rope: Any, only_last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual and what is still to be added to it; ``x`` and ``delta`` [n, hidden] are those of the layer
        before, and ``x`` is overwritten.  ``only_last`` keeps each row's last token once all have attended."""
        heads = self.attention(self.attention_norm(x, delta), attn, rope)
        if only_last:
            x, heads = attn.last_rows(x), attn.last_rows(heads)
        return x, self.mlp(self.mlp_norm(x, self.attention.out(heads)))


class Decoder(nn.Module):
    """Embedding, layers, final norm and head: from token ids to the logits of each row's last token.

    ``layers`` are called as :class:`DecoderLayer` is.
    """

    def __init__(
        self, embedding: Embedding | TiedEmbedding, layers: Sequence[nn.Module], norm: RMSNorm, head: PackedLinear
    ) -> None:
        super().__init__()
        self.embedding: Embedding | TiedEmbedding = embedding
        self.layers, self.norm, self.head = nn.ModuleList(layers), norm, head

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def forward(self, x: torch.Tensor, attn: Any, rope: Any) -> torch.Tensor:
        """Logits [rows, vocabulary] of embedded tokens ``x`` [tokens, hidden], rows packed one behind the other."""
        return self.head(self.hidden(x, attn, rope, only_last=True))

    def hidden(self, x: torch.Tensor, attn: Any, rope: Any, *, only_last: bool) -> torch.Tensor:
        """What the head reads, of every token [tokens, hidden] or of each row's last alone [rows, hidden].

        ``x`` is overwritten.
        """
        delta, last = None, len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x, delta = layer(x, delta, attn, rope, only_last=only_last and index == last)
        return self.norm(x, delta)
