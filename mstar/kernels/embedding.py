"""Embedding rows of each request's last token, read where the sampler keeps it."""

from __future__ import annotations

import torch


def embed_rows(
    weight: torch.Tensor, last_token: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers the ids at ``index`` and their embeddings.

    Args:
        weight: [V, hidden], rows contiguous.
        last_token: int64 [N], ids in 0 .. V - 1: the sampler's master.
        index: int64 [B], places in it.

    Returns:
        ids int64 [B], and their rows of ``weight`` [B, hidden].
    """
    ids = last_token.index_select(0, index)
    return ids, weight.index_select(0, ids)
