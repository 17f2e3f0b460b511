"""Attention over a paged fp32 cache on the CPU: an LLVM kernel that reads keys and values where they lie.

One item is one query token and one kv head: it attends with all query heads of the group, so that each stored vector
is loaded once; in a decode step it stores the token's key and value before.  An item is never split, and adds up in
the order of positions, so its result depends on its own keys alone, whatever the batch, the pages and the number of
threads; threads take contiguous items of about equal total length.
"""

from __future__ import annotations

import functools
from typing import Self

import numpy as np
import torch

from mstar.kernels.cpu.jit import Worker, make_or_warn, vector_lanes, words
from mstar.kernels.cpu.paged_decode_ir import ARGUMENTS, module_ir

_OF_A_LAYER = ARGUMENTS.index("pages")  # arguments before this one are each call's own
_PAGES, _PAGE_STARTS, _LENGTHS, _FIRSTS, _COSTS, _SCORES, _ROWS, _SCORES_STRIDE, _STORES = range(
    _OF_A_LAYER, len(ARGUMENTS)
)
_SCORES_STEP = 256  # positions by which scratch grows, a multiple of any vector's lanes
_CACHE_LINE = 16  # fp32


class PagedDecodeKernel:
    """The kernel compiled for one shape of heads and pages.

    Args:
        heads: query heads, a multiple of ``kv_heads``.
        lanes: of the vectors; None for the most that the CPU has.

    Raises:
        OSError: the CPU's vectors are too short, or ``dim`` is no multiple of their lanes.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, page_size: int, lanes: int | None = None) -> None:
        self.heads, self.kv_heads, self.dim, self.page_size = heads, kv_heads, dim, page_size
        self.lanes = lanes or vector_lanes()
        if dim % self.lanes:
            raise OSError(f"head_dim {dim} is no multiple of {self.lanes} lanes")
        self.worker = Worker(module_ir(heads // kv_heads, kv_heads, dim, page_size, self.lanes))


@functools.cache
def paged_decode_kernel(heads: int, kv_heads: int, dim: int, page_size: int) -> PagedDecodeKernel | None:
    """The kernel, compiled once per process and shape in about 0.1 s; None, with a warning, where it cannot be made.

    Arguments as :class:`PagedDecodeKernel` takes them.
    """
    return make_or_warn("decode attention", lambda: PagedDecodeKernel(heads, kv_heads, dim, page_size))


class PagedDecode:
    """Query tokens, each over positions of its own: planned once per step, attended once per layer.

    An object that is planned again and again does little each time: it keeps its scratch, and what the kernel was told
    of arrays that are still the same.
    """

    def __init__(self, kernel: PagedDecodeKernel) -> None:
        self._kernel = kernel
        self._arguments = words(*[0] * len(ARGUMENTS))
        self._threads = self._longest = 0  # what the scratch has room for
        self._capacity = -1  # query tokens that the kernel's own arrays have room for
        self._ends = self._firsts = self._costs = np.empty(0, np.int64)
        self._has_firsts = False
        self._pages = self._page_starts = self._starts = np.empty(0, np.int32)
        self._tokens = -1  # of the last plan

    def plan(
        self,
        ends: np.ndarray,
        pages: np.ndarray,
        page_starts: np.ndarray,
        firsts: np.ndarray | None = None,
        stores: bool = True,
    ) -> Self:
        """Plans a step of ``B`` query tokens.

        Args:
            ends: int64 [B], the position after the last one each token sees; 0 gives zeros.
            pages: int32, pages of all rows; read where it lies, so it must stay as it is until the step is over.
            page_starts: int32 [B] or longer, where in ``pages`` those of the token's row begin; copied, unless it is
                the array of the last plan.
            firsts: int64 [B], the first position each token sees, below its end; None for 0.
            stores: whether ``k`` and ``v`` belong at position ``ends - 1`` and are stored there first.  Otherwise
                they must be in the cache already.
        """
        tokens, arguments = ends.size, self._arguments
        if tokens > self._capacity:
            self._grow(tokens)
        self._reserve_scores(int(np.maximum.reduce(ends, initial=0)))
        self._ends[:tokens] = ends
        if firsts is not None:
            self._firsts[:tokens] = firsts
        elif self._has_firsts:
            self._firsts[:] = 0
        self._has_firsts = firsts is not None
        if pages is not self._pages:
            self._pages = np.ascontiguousarray(pages)
            arguments[_PAGES] = self._pages.ctypes.data
        if page_starts is not self._page_starts or tokens != self._tokens:
            self._page_starts, self._tokens = page_starts, tokens
            self._starts[:tokens] = page_starts[:tokens]
            self._share(ends, firsts)
        arguments[_ROWS], arguments[_STORES] = tokens, stores
        return self

    def plan_rows(
        self,
        kv_lens: np.ndarray,
        spans: np.ndarray,
        pages: np.ndarray,
        page_starts: np.ndarray,
        *,
        causal: bool,
        window: int | None,
    ) -> Self:
        """Plans rows of any number of query tokens, the last ``spans`` positions of each, whose keys are stored before.

        Args:
            kv_lens, spans: int64 [rows], tokens of each row with the new ones, and its query tokens.
            pages, page_starts: as above, but [rows].
            window: tokens a query sees up to its own position, itself included; None for all.
        """
        own_ends = np.repeat(kv_lens - np.cumsum(spans), spans) + np.arange(1, int(spans.sum()) + 1)
        ends = own_ends if causal else np.repeat(kv_lens, spans)
        return self.plan(ends, pages, np.repeat(page_starts, spans), first_seen(own_ends, window), stores=False)

    def _share(self, ends: np.ndarray, firsts: np.ndarray | None) -> None:
        """By what the threads share the items.

        Nothing else hangs on it, so it may be a few tokens old: it is renewed when the rows or their pages change.
        """
        lengths = ends if firsts is None else ends - firsts
        costs = self._costs[1 : ends.size + 1]
        np.add(lengths, self._kernel.lanes, out=costs)  # besides its length, an item costs as much as one block more
        np.add.accumulate(costs, out=costs)

    def _grow(self, tokens: int) -> None:
        """Arrays for ``tokens`` query tokens; the kernel reads them through their addresses."""
        self._capacity, self._has_firsts, self._tokens = tokens, False, -1
        self._ends, self._firsts, self._costs = (np.zeros(n, np.int64) for n in (tokens, tokens, tokens + 1))
        arrays = (self._ends, self._firsts, self._costs)
        self._arguments[_LENGTHS : _COSTS + 1] = [array.ctypes.data for array in arrays]
        self._starts = np.zeros(tokens, np.int32)
        self._arguments[_PAGE_STARTS] = self._starts.ctypes.data

    def _reserve_scores(self, longest: int) -> None:
        """Scratch for each thread and tokens that see up to ``longest`` positions."""
        threads = torch.get_num_threads()
        if threads == self._threads and longest <= self._longest:
            return
        self._threads, self._longest = threads, -(-longest // _SCORES_STEP) * _SCORES_STEP
        # A cache line more, lest the scores of one block for all heads share one set of the cache.
        stride = self._longest + _CACHE_LINE
        self._scores = np.empty((threads, self._kernel.heads // self._kernel.kv_heads, stride), np.float32)
        self._arguments[_SCORES], self._arguments[_SCORES_STRIDE] = self._scores.ctypes.data, stride

    def attend(
        self, layer: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attends, after storing k and v if that was planned.

        Args:
            layer: fp32 [pages, 2, page_size, Hkv, D], contiguous; written.
            q: fp32 [B, Hq, D]; k, v: fp32 [B, Hkv, D], any strides, read only to be stored.  Scores are scaled by
                ``D ** -0.5``.
            out: fp32 [B, Hq, D], contiguous, for the result; None for a new one.

        Returns:
            ``out``.
        """
        q, k, v = _dense_heads(q), _dense_heads(k), _dense_heads(v)
        if out is None:
            out = torch.empty(q.shape)
        addresses = [tensor.data_ptr() for tensor in (q, k, v, out, layer)]
        self._arguments[:_OF_A_LAYER] = [*addresses, q.stride(0), k.stride(0), v.stride(0)]
        self._kernel.worker(self._arguments, self._threads)
        return out


def first_seen(own_ends: np.ndarray, window: int | None) -> np.ndarray | None:
    """The first position each token sees, int64 [n], for one that is the last before ``own_ends`` [n]; None for 0."""
    return None if window is None else np.maximum(own_ends - window, 0)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the heads of a row side by side; rows keep their stride."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
