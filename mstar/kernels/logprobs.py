"""What is told of a position: the log-probability and rank of its token, and the most likely tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_COLUMNS = 8192  # exponentials made at once: they stay in cache, and no row's sum depends on how many rows there are

TopTokens = Callable[[torch.Tensor, int], torch.Tensor]


class Told(NamedTuple):
    """Of ``n`` positions.  Past the tokens that were asked for, ids are -1 and their log-probabilities 0."""

    logprob: torch.Tensor  # float32 [n]
    rank: torch.Tensor  # int32 [n], 1 is the most likely
    top_ids: torch.Tensor  # int32 [n, width]
    top_logprobs: torch.Tensor  # float32 [n, width]


def top_tokens(x: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` largest of each row of ``x`` fp32 [n, V], k <= V: ids int64 [n, k], the largest first and the lowest id
    first among equal ones."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 is no less than 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as the floats are ordered
    ids = torch.arange(x.shape[1], device=x.device)
    keys = (ordered << 32) | (x.shape[1] - 1 - ids)
    return x.shape[1] - 1 - (keys.topk(k, dim=1).values & 0xFFFFFFFF)


def tell(
    x: torch.Tensor,
    tokens: torch.Tensor,
    num_top: torch.Tensor,
    most: int,
    width: int,
    top: TopTokens = top_tokens,
) -> Told:
    """Log-probabilities under the softmax of ``x``.

    A token at -inf has -inf, and no row of them makes a NaN.

    Args:
        x: logits fp32 [n, V].
        tokens: int64 [n].
        num_top: int64 [n], tokens to tell of each position, fewer where V is; -1 tells of nothing: logprob and rank
            are 0 there.
        most: no ``num_top`` is larger.
        width: columns of the result, at least ``most``.
        top: :func:`top_tokens` or a faster one.
    """
    chosen = x.gather(1, tokens[:, None])
    peak = x.amax(1, keepdim=True)
    peak = torch.where(peak.isfinite(), peak, 0)
    mass = torch.zeros(x.shape[0], 1, dtype=torch.float64, device=x.device)
    rank = torch.ones(x.shape[0], 1, device=x.device)
    for part in x.split(_COLUMNS, dim=1):
        mass += (part - peak).exp_().sum(1, keepdim=True)
        rank += part.clone().gt_(chosen).sum(1, keepdim=True)  # counted in floats, which CPUs do in vectors
    log_mass = mass.log_()
    is_told = num_top >= 0
    told = Told(
        torch.where(is_told, _log_probability(chosen, peak, log_mass).squeeze(1), 0),
        torch.where(is_told, rank.squeeze(1), 0).int(),
        torch.full((x.shape[0], width), -1, dtype=torch.int32, device=x.device),
        torch.zeros(x.shape[0], width, device=x.device),
    )
    k = min(most, x.shape[1])
    if k > 0:
        ids = top(x, k)
        is_asked = torch.arange(k, device=x.device) < num_top[:, None]
        told.top_ids[:, :k] = torch.where(is_asked, ids, -1)
        told.top_logprobs[:, :k] = torch.where(is_asked, _log_probability(x.gather(1, ids), peak, log_mass), 0)
    return told


def _log_probability(x: torch.Tensor, peak: torch.Tensor, log_mass: torch.Tensor) -> torch.Tensor:
    told = (x.double() - peak.double() - log_mass).float()
    return torch.where(x == -torch.inf, x, told)
