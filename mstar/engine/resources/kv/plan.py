"""The index arrays of one step over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from mstar.engine.resources.kv.device_view import DeviceView
from mstar.engine.resources.kv.step_rows import PlannedRows, StepRows
from mstar.engine.resources.ragged import indptr, ragged_arange


class PagedIndptrs:
    """Which pages each of ``B`` rows reads, as FlashInfer takes it: int32 NumPy arrays on the host.

    Row ``i`` has the new tokens ``qo_indptr[i] : qo_indptr[i + 1]`` and reads the pages
    ``paged_kv_indices[paged_kv_indptr[i] : paged_kv_indptr[i + 1]]``, of which the last holds
    ``paged_kv_last_page_len[i]`` tokens: ``page_size`` when it is full, 0 only when the row has no page.  Pages that
    the row doesn't own are the sink page.  ``kv_lens`` is ``max(pages - 1, 0) * page_size + last_page_len``.

    ``page_size`` int32 [1].
    """

    def __init__(
        self,
        qo_indptr: np.ndarray,  # [B + 1]
        paged_kv_indptr: np.ndarray,  # [B + 1]
        paged_kv_indices: np.ndarray,  # [pages of all rows]
        kv_lens: np.ndarray,  # [B], new tokens included; iterated: NumPy scalars, which FlashInfer's plan wants
        page_size: np.ndarray,
    ) -> None:
        self.qo_indptr = qo_indptr
        self.paged_kv_indptr = paged_kv_indptr
        self.paged_kv_indices = paged_kv_indices
        self.kv_lens = kv_lens
        self.page_size = page_size

    @cached_property
    def paged_kv_last_page_len(self) -> np.ndarray:
        """[B]; made when somebody asks, which the kernels of the CPU never do."""
        whole_pages = np.maximum(np.diff(self.paged_kv_indptr) - 1, 0)
        return self.kv_lens - whole_pages * self.page_size


class HostPlan:
    """The part of a plan that is computed on the host; ``addresses`` int64 [tokens of the rows] are the keys'.

    ``indptrs`` are made when somebody reads them, which must be before the step commits: kernels that find pages on the
    device never do.
    """

    def __init__(
        self,
        starts: np.ndarray,
        kv_lens: np.ndarray,
        addresses: np.ndarray,
        indptrs: PagedIndptrs | Callable[[], PagedIndptrs],
    ) -> None:
        self.starts = starts
        self.kv_lens = kv_lens
        self.addresses = addresses
        self._indptrs = indptrs

    @property
    def indptrs(self) -> PagedIndptrs:
        indptrs = self._indptrs
        if not isinstance(indptrs, PagedIndptrs):
            indptrs = self._indptrs = indptrs()
        return indptrs


class DeferredHostPlan:
    """A :class:`HostPlan` that is made when somebody reads it, which must be before the step commits."""

    def __init__(self, make: Callable[[], HostPlan]) -> None:
        self._make = make
        self._plan: HostPlan | None = None

    def renew(self) -> None:
        """What was made is no longer right."""
        self._plan = None

    @property
    def starts(self) -> np.ndarray:
        return self._made().starts

    @property
    def kv_lens(self) -> np.ndarray:
        return self._made().kv_lens

    @property
    def indptrs(self) -> PagedIndptrs:
        return self._made().indptrs

    def _made(self) -> HostPlan:
        if self._plan is None:
            self._plan = self._make()
        return self._plan


class StepHead(Protocol):
    """What a forward computes on the device before its first layer, for all labels of the step; once per plan."""

    @property
    def rows(self) -> StepRows:
        """The step's; each has one new token, and equal batches have one array of streams."""
        ...

    def begin(self) -> None: ...


@dataclass(eq=False)
class KVPlan:
    """What attention and positions read of one plan label of a step.  ``B`` rows, padding included.

    Without combined labels real rows come first; a combined label is its sources laid end to end, each in that
    order.  ``num_tokens`` counts the tokens that the forward sees: the rows' own, ``indptrs.qo_indptr[-1]``, then
    those of a padded bucket.  ``key_index`` and ``value_index``, int64 [num_tokens] on the device, say where each
    token's key and value go in a layer seen as [pages * 2 * page_size, kv heads, head_dim]; tokens that belong to no
    row go to the sink page.

    ``view``: the same on the device, for kernels that want it there.  With ``head`` the forward itself computes the
    indices and the view's ``kv_lens``, in :meth:`begin`; the plan is the same object for as long as its batch is.
    """

    label: str
    rows: np.ndarray  # int64 [B], master rows
    streams: np.ndarray  # int64 [B]
    spans: np.ndarray  # int64 [B], new tokens
    host: HostPlan | DeferredHostPlan
    key_index: torch.Tensor
    value_index: torch.Tensor
    is_decode: bool  # every row has exactly one new token
    num_tokens: int
    num_real: int
    view: DeviceView | None = None
    head: StepHead | None = None

    @property
    def starts(self) -> np.ndarray:
        """Tokens stored before the step, int64 [B]."""
        return self.host.starts

    @property
    def kv_lens(self) -> np.ndarray:
        """``starts`` + ``spans``, int64 [B]."""
        return self.host.kv_lens

    @property
    def indptrs(self) -> PagedIndptrs:
        return self.host.indptrs

    def begin(self) -> None:
        """Called by every forward of the step before it uses an index or the view; computes them at most once."""
        if self.head is not None:
            self.head.begin()


def host_plan(rows: PlannedRows, stored_len: np.ndarray, table: np.ndarray, page_size: int) -> HostPlan:
    """Plans rows from their streams alone.

    Args:
        stored_len: int64 [streams], tokens stored.
        table: int32 [streams, pages of the longest stream], the sink page where a stream owns none.
    """
    starts = stored_len[rows.streams]
    kv_lens = starts + rows.spans
    if rows.is_decode:
        addresses = _addresses_of(rows.streams, starts, table, page_size)
    else:
        addresses = write_addresses(rows, starts, table, page_size)
    return HostPlan(starts, kv_lens, addresses, lambda: _indptrs(rows, kv_lens, table, page_size))


def _indptrs(rows: PlannedRows, kv_lens: np.ndarray, table: np.ndarray, page_size: int) -> PagedIndptrs:
    pages = (kv_lens + (page_size - 1)) // page_size
    kv_indptr = indptr(pages)
    width = table.shape[1]
    first = rows.streams * width
    longest = np.maximum.reduce(pages, initial=0)
    if longest > width:  # a padding row of a capture wider than any stream: all of it is sink
        flat = first.repeat(pages) + np.minimum(ragged_arange(pages), width - 1)
    else:
        flat = (first - kv_indptr[:-1]).repeat(pages)
        flat += np.arange(flat.size)
    return PagedIndptrs(
        qo_indptr=rows.qo_indptr,
        paged_kv_indptr=kv_indptr.astype(np.int32),
        paged_kv_indices=table.reshape(-1).take(flat),
        kv_lens=kv_lens.astype(np.int32),
        page_size=np.array([page_size], np.int32),
    )


def write_addresses(rows: PlannedRows, starts: np.ndarray, table: np.ndarray, page_size: int) -> np.ndarray:
    """Where each new token's key is stored, int64 [tokens]; its value lies ``page_size`` further.

    ``starts`` int64 [B] tokens stored before.  Positions past a stream's last column, which only padding rows have,
    take its last page.
    """
    position = (starts - rows.qo_indptr[:-1]).repeat(rows.spans)
    position += np.arange(position.size)
    return _addresses_of(rows.streams.repeat(rows.spans), position, table, page_size)


def _addresses_of(streams: np.ndarray, position: np.ndarray, table: np.ndarray, page_size: int) -> np.ndarray:
    page = position // page_size
    address = position - page * page_size
    last = table.shape[1] - 1
    if page.size and page.max() > last:
        page = np.minimum(page, last)
    page += streams * table.shape[1]
    address += table.reshape(-1).take(page).astype(np.int64) * (2 * page_size)
    return address
