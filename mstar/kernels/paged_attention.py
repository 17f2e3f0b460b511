"""Attention over a paged cache whose page table and lengths lie on the device: the rule, in torch operators.

A cache layer is [pages, 2, page_size, Hkv, D], keys at 0, values at 1.  Row ``b`` of a call reads ``kv_lens[b]``
tokens of stream ``streams[b]``, whose pages are ``table[streams[b]]`` in order.  Query heads ``h * Hq // Hkv`` and
following share kv head ``h``.  Kernels of :mod:`mstar.kernels.cuda.paged_attention` take the same arguments.
"""

from __future__ import annotations

import torch


def paged_decode_reference(
    q: torch.Tensor,
    layer: torch.Tensor,
    table: torch.Tensor,
    streams: torch.Tensor,
    kv_lens: torch.Tensor,
    scratch: object = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    deterministic: bool = False,
    repeats_rows: bool = False,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query per row, the last of its tokens; arguments as :func:`paged_prefill_reference`, ``order`` is unused."""
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_prefill_reference(q, layer, table, streams, kv_lens, starts, window=window, scale=scale)


def paged_prefill_reference(
    q: torch.Tensor,
    layer: torch.Tensor,
    table: torch.Tensor,
    streams: torch.Tensor,
    kv_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    scratch: object = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    repeats_rows: bool = False,
) -> torch.Tensor:
    """Rows of any number of queries on one token axis.

    Args:
        q: [T, Hq, D].  Row ``b``'s are ``q_indptr[b]`` to ``q_indptr[b + 1]``, the last of its tokens.
        layer: [pages, 2, page_size, Hkv, D], any float dtype.
        table: int32 [streams, width], pages of each stream.
        streams, kv_lens: int32 [B].  A row without tokens gives zeros.
        q_indptr: int32 [B + 1]; tokens from ``q_indptr[B]`` on are padding and give zeros.
        scratch: memory of kernels that share rows out; nothing here.
        causal: a query sees no later token than its own.
        window: tokens a query sees up to its own, itself included; None for all.
        scale: of scores; None is ``D ** -0.5``.
        deterministic: nothing here, where every token is computed by itself.
        repeats_rows: nothing here, where nothing is read ahead.

    Returns:
        [T, Hq, D], dtype of ``q``.
    """
    page_size, dim = layer.shape[2], q.shape[2]
    group = q.shape[1] // layer.shape[3]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = q_indptr.tolist()
    for begin, end, stream, kv_len in zip(starts, starts[1:], streams.tolist(), kv_lens.tolist(), strict=False):
        if begin == end or kv_len == 0:
            continue
        pages = table[stream, : -(-kv_len // page_size)].long()
        k, v = (layer[pages, i].flatten(0, 1)[:kv_len].to(q.dtype).float() for i in (0, 1))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        position = torch.arange(kv_len - (end - begin), kv_len, device=q.device)[:, None]
        key = torch.arange(kv_len, device=q.device)
        is_seen = key <= position if causal else (key >= 0).expand(end - begin, -1)
        if window is not None:
            is_seen = is_seen & (key > position - window)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * (dim**-0.5 if scale is None else scale)
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
