"""Attention over a paged cache on NVIDIA GPUs; the rule is :mod:`mstar.kernels.paged_attention`.

Nothing here needs the lengths on the host: grids follow from shapes, so that a captured launch serves any lengths.
"""

from __future__ import annotations

import torch

from mstar.kernels.cuda.decode_shares import DecodeScratch
from mstar.kernels.cuda.decode_split import ROW_SHARES
from mstar.kernels.cuda.paged_decode import is_for_prefill, paged_decode
from mstar.kernels.cuda.paged_prefill import paged_prefill

__all__ = ["ROW_SHARES", "DecodeScratch", "paged_decode", "paged_mixed", "paged_prefill"]


def paged_mixed(
    q: torch.Tensor,
    layer: torch.Tensor,
    table: torch.Tensor,
    streams: torch.Tensor,
    kv_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    scratch: DecodeScratch,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    repeats_rows: bool = False,
) -> torch.Tensor:
    """As :func:`mstar.kernels.paged_attention.paged_prefill_reference`, for rows of which many have one query.

    Two kernels look at all rows: one takes those of one query, which it shares out by keys, and the other the rest and
    the padding.  A tile of the other would read a long row's keys one block after another, for few queries.

    Args:
        q: [T, Hq, D] with contiguous heads; at most the rows of ``scratch``, and its heads.
        layer: contiguous.
        scale: positive.
        deterministic: a token's bits depend on its own keys alone, and are those of the other functions.
        repeats_rows: as :func:`paged_decode`'s.
    """
    rows = (layer, table, streams, kv_lens)
    if streams.shape[0] == 1 or is_for_prefill(q, deterministic):
        return paged_prefill(q, *rows, q_indptr, causal=causal, window=window, scale=scale, deterministic=deterministic)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.shape[0] > 0:
        paged_decode(
            q, *rows, scratch, window=window, scale=scale, repeats_rows=repeats_rows, q_indptr=q_indptr, out=out
        )
        paged_prefill(q, *rows, q_indptr, causal=causal, window=window, scale=scale, skips_single=True, out=out)
    return out
