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
EMPTY, WHOLE, PAGED = range(3)  # kinds of rows; from PAGED on, one kind for each class of length


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


@dataclass(frozen=True)
class RowByToken:
    """One row whose every query is a call of its own, over the keys that it sees and no other.

    A call's shapes, strides and alignment, and so the order in which it adds up, depend on these keys alone.
    ``pages`` int64 [pages of the row]; query ``i`` sees positions ``seen[i]``.
    """

    tokens: torch.Tensor | slice
    pages: torch.Tensor
    seen: tuple[slice, ...]


@dataclass(frozen=True)
class NoKeys:
    """Queries of rows that hold nothing yet: zeros come of them."""

    tokens: torch.Tensor | slice


Group = WholeRows | PagedRows | RowByToken | NoKeys


def plan_groups(
    kv_lens: np.ndarray,
    spans: np.ndarray,
    pages: np.ndarray,
    page_starts: np.ndarray,
    page_size: int,
    *,
    causal: bool,
    window: int | None,
    max_gather: int,
    device: torch.device,
    dtype: torch.dtype,
    own_keys: bool = True,
    by_token: bool = False,
) -> list[Group]:
    """Splits a step's rows into groups of equal shape.

    Args:
        kv_lens, spans: int64 [B], tokens of each row with the new ones, and its query tokens, which are the last.
        pages: int32, pages of all rows; ``page_starts`` int32 [B + 1], where in it each row's begin and end.
        window: tokens a query sees up to its own position, itself included; None for all.
        max_gather: tokens whose pages one group may gather; a single row may exceed it.
        dtype: of queries.
        own_keys: every query token is a new token of its row, so that the step's own k and v hold its key.
        by_token: results that depend on a token's own keys alone, at the price of one call for each.

    Returns:
        Groups that together hold every query token once.
    """
    if by_token:
        return _rows_by_token(kv_lens, spans, pages, page_starts, causal, window, device)
    token_starts, num_tokens = np.cumsum(spans) - spans, int(spans.sum())
    # Rows whose queries are all they hold and that fit the window need neither pages nor mask: their keys are at hand.
    whole = (kv_lens == spans) & (spans > 1) if own_keys else np.zeros(spans.size, np.bool_)
    if window is not None:
        whole &= spans <= window
    is_paged = ~whole & (spans > 0) & (kv_lens > 0)
    length_class = np.where(whole, WHOLE, np.where(is_paged, PAGED, EMPTY))
    paged_lens = kv_lens[is_paged]
    if paged_lens.size and paged_lens.max() * paged_lens.size > MAX_PADDING * (paged_lens + page_size).sum():
        by_length = PAGED + np.ceil(np.log2(np.maximum(kv_lens, page_size))).astype(np.int64)
        length_class = np.where(is_paged, by_length, length_class)
    groups: list[Group] = []
    for kind, n, rows in _equal_rows(length_class, spans):
        if kind < PAGED:
            tokens = _token_selection(token_starts[rows], n, num_tokens, device)
            groups.append(WholeRows(tokens, rows.size, n, causal) if kind == WHOLE else NoKeys(tokens))
            continue
        width = -(-int(kv_lens[rows].max()) // page_size)
        step = max(1, max_gather // (width * page_size))
        for part in (rows[i : i + step] for i in range(0, rows.size, step)):
            tokens = _token_selection(token_starts[part], n, num_tokens, device)
            # Shorter rows repeat their last page, hidden by the mask: another's might hold NaN, which no mask hides.
            columns = np.minimum(page_starts[part, None] + np.arange(width), page_starts[part + 1, None] - 1)
            key_pages = pages[columns].astype(np.int64).reshape(-1) * 2
            page_index = torch.from_numpy(np.concatenate((key_pages, key_pages + 1))).to(device)
            mask = _mask(kv_lens[part] - n, n, width * page_size, causal, window, device, dtype)
            groups.append(PagedRows(tokens, part.size, n, page_index, mask))
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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends over the step's own and the stored keys and values, which :func:`write_kv` has stored already.

    Args:
        layer: [pages, 2, page_size, Hkv, D], contiguous, any float dtype.
        q: [n, Hq, D].  Scores are scaled by ``D ** -0.5``.
        k, v: [n, Hkv, D]; unread, and of any length, where groups were planned without ``own_keys``.
        scratch: dtype of ``layer``, at least :func:`gathered_elements`; holds one group's pages at a time, since
            fresh memory for each layer costs more than the copy.
        out: [n, Hq, D] for the result; None for a new one.

    Returns:
        [n, Hq, D], dtype of ``q``.
    """
    if layer.dtype != q.dtype:  # a token sees itself as later tokens will see it
        k, v = k.to(layer.dtype).to(q.dtype), v.to(layer.dtype).to(q.dtype)
    if out is None and len(groups) == 1:
        (only,) = groups
        if isinstance(only, WholeRows | PagedRows) and only.tokens == slice(None):
            return _attend_group(only, layer, q, k, v, scratch)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in groups:
        at = group.tokens
        if isinstance(group, NoKeys):
            out[at] = 0
            continue
        own = (k[at], v[at]) if isinstance(group, WholeRows) else (k, v)
        out[at] = _attend_group(group, layer, q[at], *own, scratch)
    return out


def _attend_group(
    group: WholeRows | PagedRows | RowByToken,
    layer: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scratch: torch.Tensor,
) -> torch.Tensor:
    if isinstance(group, RowByToken):
        return _attend_by_token(group, layer, q)
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


def _attend_by_token(group: RowByToken, layer: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    # Tensors of their own, since BLAS picks its kernels by alignment too.
    keys, values = (layer[:, i].index_select(0, group.pages).flatten(0, 1).to(q.dtype) for i in (0, 1))
    kv_heads, out = keys.shape[1], torch.empty_like(q, memory_format=torch.contiguous_format)
    for i, seen in enumerate(group.seen):
        query = q[i].clone(memory_format=torch.contiguous_format).view(1, kv_heads, -1, q.shape[2])
        key, value = (x[seen].transpose(0, 1)[None] for x in (keys, values))
        out[i] = scaled_dot_product_attention(query, key, value).view(q.shape[1:])
    return out


def _rows_by_token(
    kv_lens: np.ndarray,
    spans: np.ndarray,
    pages: np.ndarray,
    page_starts: np.ndarray,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> list[Group]:
    groups: list[Group] = []
    ends = np.cumsum(spans)
    for row in np.flatnonzero(spans).tolist():
        tokens, kv_len = slice(int(ends[row] - spans[row]), int(ends[row])), int(kv_lens[row])
        if kv_len == 0:
            groups.append(NoKeys(tokens))
            continue
        own = torch.from_numpy(pages[page_starts[row] : page_starts[row + 1]].astype(np.int64)).to(device)
        own_ends = range(kv_len - int(spans[row]) + 1, kv_len + 1)
        seen = (slice(0 if window is None else max(e - window, 0), e if causal else kv_len) for e in own_ends)
        groups.append(RowByToken(tokens, own, tuple(seen)))
    return groups


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
