"""Attention over a paged cache with torch's scaled-dot-product attention.

A step's rows fall into groups of equal query length; one group is one call.  Everything that is the same for all
layers (page gather index, mask) is prepared once per step in a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_PADDING = 2  # gathered tokens over real ones, from which rows are split by length
GATHER_BYTES = 16 << 20  # of one call's pages: they should stay in the last-level cache between copy and use


@dataclass(frozen=True)
class WholeRows:
    """``g`` rows of ``n`` tokens that hold nothing before them: their keys are the step's own."""

    tokens: torch.Tensor | slice  # where they lie on the packed token axis
    g: int
    n: int
    causal: bool


@dataclass(frozen=True)
class PagedRows:
    """``g`` rows of ``n`` new tokens over their pages.

    ``pages`` int64 [2 * g * width]: key pages of all rows, then value pages, in the cache seen as [2 * pages, ...].
    ``mask`` of the query's dtype [g, 1, n, width * page_size], added to the scores.
    """

    tokens: torch.Tensor | slice
    g: int
    n: int
    pages: torch.Tensor
    mask: torch.Tensor


Group = WholeRows | PagedRows


def plan_groups(
    starts: np.ndarray,
    spans: np.ndarray,
    page_table: np.ndarray,
    page_size: int,
    *,
    causal: bool,
    window: int | None,
    max_gather: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Group]:
    """Splits a step's rows into groups of equal shape.

    Args:
        starts, spans: int64 [B], tokens before the step and new tokens of each row.
        page_table: int32 [B, pages]; row ``i`` reads its first ``ceil((starts[i] + spans[i]) / page_size)``.
        window: tokens a query sees, itself included; None for all.
        max_gather: tokens whose pages one group may gather; a single row may exceed it.
        dtype: of queries.

    Returns:
        Groups that together hold every new token once.
    """
    kv_lens = starts + spans
    # Rows that start at 0 and fit the window need neither pages nor mask; their keys are at hand.
    whole = (starts == 0) & (spans > 1)
    if window is not None:
        whole &= spans <= window
    length_class = np.where(whole, 0, 1)
    paged_lens = kv_lens[~whole & (spans > 0)]
    if paged_lens.size and paged_lens.max() * paged_lens.size > MAX_PADDING * (paged_lens + page_size).sum():
        by_length = 1 + np.ceil(np.log2(np.maximum(kv_lens, page_size))).astype(np.int64)
        length_class = np.where(whole, 0, by_length)
    token_starts = np.cumsum(spans) - spans
    groups: list[Group] = []
    for kind, n, rows in _equal_rows(length_class, spans):
        if kind == 0:
            tokens = _token_selection(token_starts[rows], n, int(spans.sum()), device)
            groups.append(WholeRows(tokens, rows.size, n, causal))
            continue
        width = -(-int(kv_lens[rows].max()) // page_size)
        step = max(1, max_gather // (width * page_size))
        for part in (rows[i : i + step] for i in range(0, rows.size, step)):
            tokens = _token_selection(token_starts[part], n, int(spans.sum()), device)
            key_pages = page_table[part, :width].astype(np.int64).reshape(-1) * 2
            pages = torch.from_numpy(np.concatenate((key_pages, key_pages + 1))).to(device)
            mask = _mask(starts[part], n, width * page_size, causal, window, device, dtype)
            groups.append(PagedRows(tokens, part.size, n, pages, mask))
    return groups


def gathered_elements(groups: list[Group], layer: torch.Tensor) -> int:
    """Cache elements of the largest gather among ``groups``: the scratch that :func:`attend` needs."""
    pages = max((group.pages.numel() for group in groups if isinstance(group, PagedRows)), default=0)
    return pages * layer[0, 0].numel()


def write_kv(
    layer: torch.Tensor, key_index: torch.Tensor, value_index: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Stores k and v [n, Hkv, D] at their rows [n] of ``layer`` seen as [pages * 2 * page_size, Hkv, D]."""
    flat = layer.view(-1, *layer.shape[3:])
    flat[key_index] = k.to(layer.dtype)
    flat[value_index] = v.to(layer.dtype)


def attend(
    groups: list[Group],
    layer: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Attends over the step's own and the stored keys and values, which :func:`write_kv` has stored already.

    Args:
        layer: [pages, 2, page_size, Hkv, D], contiguous, any float dtype.
        q: [n, Hq, D]; k, v: [n, Hkv, D].  Scores are scaled by ``D ** -0.5``.
        scratch: dtype of ``layer``, at least :func:`gathered_elements`; holds one group's pages at a time, since
            fresh memory for each layer costs more than the copy.

    Returns:
        [n, Hq, D], dtype of ``q``.
    """
    if layer.dtype != q.dtype:  # a token sees itself as later tokens will see it
        k, v = k.to(layer.dtype).to(q.dtype), v.to(layer.dtype).to(q.dtype)
    if len(groups) == 1 and isinstance(groups[0].tokens, slice):
        return _attend_group(groups[0], layer, q, k, v, scratch)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in groups:
        at = group.tokens
        own = (k[at], v[at]) if isinstance(group, WholeRows) else (k, v)
        out[at] = _attend_group(group, layer, q[at], *own, scratch)
    return out


def _attend_group(
    group: Group, layer: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scratch: torch.Tensor
) -> torch.Tensor:
    heads, dim = q.shape[1:]
    g, n = group.g, group.n
    kv_heads = k.shape[1]
    if isinstance(group, WholeRows):
        q, k, v = (x.reshape(g, n, -1, dim).transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=group.causal, enable_gqa=heads != kv_heads)
        return out.transpose(1, 2).reshape(g * n, heads, dim)
    pages = layer.view(2 * layer.shape[0], -1)
    gathered = scratch[: group.pages.numel() * pages.shape[1]].view(-1, pages.shape[1])
    torch.index_select(pages, 0, group.pages, out=gathered)
    if gathered.dtype != q.dtype:
        gathered = gathered.to(q.dtype)
    keys, values = gathered.view(2, g, -1, kv_heads, dim).transpose(2, 3).unbind(0)
    if n == 1:  # the query heads of one kv head are its queries: no head is copied
        out = scaled_dot_product_attention(q.reshape(g, kv_heads, -1, dim), keys, values, attn_mask=group.mask)
        return out.reshape(g, heads, dim)
    queries = q.reshape(g, n, heads, dim).transpose(1, 2)
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, enable_gqa=heads != kv_heads)
    return out.transpose(1, 2).reshape(g * n, heads, dim)


def _equal_rows(kinds: np.ndarray, spans: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """(kind, span, rows) of each set of rows that agree in both; rows without new tokens are left out."""
    if (kinds == kinds[:1]).all() and (spans == spans[:1]).all():
        if spans.size and spans[0]:
            yield int(kinds[0]), int(spans[0]), np.arange(spans.size)
        return
    keys, inverse = np.unique(np.stack((kinds, spans), 1), axis=0, return_inverse=True)
    for i, (kind, span) in enumerate(keys.tolist()):
        if span:
            yield kind, span, np.flatnonzero(inverse.reshape(-1) == i)


def _token_selection(starts: np.ndarray, n: int, num_tokens: int, device: torch.device) -> torch.Tensor | slice:
    if starts.size * n == num_tokens:
        return slice(None)
    if starts.size == 1 or (np.diff(starts) == n).all():
        return slice(int(starts[0]), int(starts[0]) + starts.size * n)
    return torch.from_numpy((starts[:, None] + np.arange(n)).reshape(-1)).to(device)


def _mask(
    starts: np.ndarray, n: int, length: int, causal: bool, window: int | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """0 where query ``starts[i] + j`` sees key position ``p``, else -inf: [g, 1, n, length]."""
    position = starts[:, None] + np.arange(n)
    last = position if causal else np.broadcast_to(starts[:, None] + n - 1, position.shape)
    keys = np.arange(length)
    hidden = keys > last[..., None]
    if window is not None:
        hidden |= keys <= position[..., None] - window
    zero = np.zeros((), np.float32)
    return torch.from_numpy(np.where(hidden, np.float32("-inf"), zero)[:, None]).to(device=device, dtype=dtype)


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None = None, causal: bool = True
) -> torch.Tensor:
    """One row by the definition of attention: q [n, Hq, D] at positions from ``start``; k, v [start + n, Hkv, D]."""
    n, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    position, key = torch.arange(start, start + n)[:, None], torch.arange(k.shape[0])[None]
    is_seen = (key <= position) if causal else torch.ones(n, k.shape[0], dtype=torch.bool)
    if window is not None:
        is_seen = is_seen & (key > position - window)
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~is_seen, float("-inf")) / dim**0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
