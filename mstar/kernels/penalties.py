"""What a request's own history does to its logits before they are sampled: penalties, and the floor under its length.

Tensor operations on fp32 logits [B, V] that depend on a row's own values alone: the reference of the forms that
`kernels/cpu` and `kernels/cuda` have of them.
"""

from __future__ import annotations

import torch

LEAST_FACTOR, MOST_FACTOR = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``x / factor`` where ``x`` is above 0, else ``x * factor``; finite values stay finite, others as they are.

    ``factor`` fp32 in ``LEAST_FACTOR .. MOST_FACTOR``, broadcast; 1 is the exact identity.
    """
    result = torch.where(x > 0, x / factor, x * factor).clamp(-MOST_FACTOR, MOST_FACTOR)
    return torch.where(x.isfinite(), result, x)


def presence_penalty(x: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Penalises every token of ``seen`` bool [B, V] by ``penalty`` fp32 [B], once each."""
    return torch.where(seen, scaled(x, penalty[:, None]), x)


def window_penalty(x: torch.Tensor, recent: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Penalises a token by ``penalty ** n`` for the ``n`` times it stands in ``recent`` int64 [B, W], -1 for none."""
    batch, vocab = x.shape
    counts = torch.zeros(batch, vocab + 1, dtype=torch.float64, device=x.device)
    ids = torch.where(recent < 0, vocab, recent)
    counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float64))
    counts = counts[:, :vocab]
    factor = (penalty.double()[:, None] ** counts).clamp(LEAST_FACTOR, MOST_FACTOR).float()
    return torch.where(counts > 0, scaled(x, factor), x)


def length_floor(x: torch.Tensor, stop_ids: torch.Tensor, is_short: torch.Tensor) -> torch.Tensor:
    """Bars ``stop_ids`` int64 [S] in the rows that ``is_short`` bool [B] names; a row that has nothing else left is
    spared."""
    floored = x.index_fill(1, stop_ids, -torch.inf)
    has_others = (floored > -torch.inf).any(-1)
    return torch.where((is_short & has_others)[:, None], floored, x)
