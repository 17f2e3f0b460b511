"""The largest of a row of logits on the CPU: most of a row is ruled out by the largest of its blocks."""

from __future__ import annotations

import torch

from mstar.kernels import logprobs

_BLOCK = 64
_MOST_CANDIDATES = 64  # per wanted token


def top_tokens(x: torch.Tensor, k: int) -> torch.Tensor:
    """:func:`mstar.kernels.logprobs.top_tokens`; reads values on the host.

    At least ``k`` tokens reach the ``k``-th largest of the blocks' maxima, and nearly always not many more.
    """
    rows, vocab = x.shape
    blocks = vocab // _BLOCK
    if blocks < k or rows == 0:
        return logprobs.top_tokens(x, k)
    whole, rest = x.split((blocks * _BLOCK, vocab - blocks * _BLOCK), dim=1)
    whole = whole.unflatten(1, (blocks, _BLOCK))
    maxima = whole.amax(2)
    bound = maxima.topk(k, dim=1).values[:, -1:]
    row_of, block = torch.nonzero(maxima >= bound, as_tuple=True)
    inside = whole[row_of, block]
    at, nth = torch.nonzero(inside >= bound[row_of], as_tuple=True)
    rest_row, rest_nth = torch.nonzero(rest >= bound, as_tuple=True)
    # Within a row ids ascend, those behind the last whole block included: stable sorts leave ties in that order.
    row = torch.cat((row_of[at], rest_row))
    ids = torch.cat((block[at] * _BLOCK + nth, blocks * _BLOCK + rest_nth))
    values = torch.cat((inside[at, nth], rest[rest_row, rest_nth]))
    counts = torch.bincount(row, minlength=rows)
    if not k <= int(counts.min()) <= int(counts.max()) <= k * _MOST_CANDIDATES:  # many ties, or a NaN
        return logprobs.top_tokens(x, k)
    order = values.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    first = counts.cumsum(0) - counts
    return ids[order[first[:, None] + torch.arange(k)]]
