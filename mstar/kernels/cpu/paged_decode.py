"""Attention over a paged fp32 cache on the CPU: an LLVM kernel that reads keys and values where they lie.

One item is one query token and one kv head: it attends with all query heads of the group, so that each stored vector
is loaded once; in a decode step it stores the token's key and value before.  An item is never split, and adds up in
the order of positions, so its result depends on its own keys alone, whatever the batch, the pages and the number of
threads; threads take contiguous items of about equal total length.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from mstar.kernels.cpu.jit import Worker, make_or_warn, vector_lanes, words
from mstar.kernels.cpu.paged_decode_ir import ARGUMENTS, module_ir

_OF_A_LAYER = [0] * ARGUMENTS.index("pages")  # the first arguments are each call's own


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
    """Planned query tokens, each over positions of its own; :meth:`attend` is called once per layer.

    Args:
        ends: int64 [B], the position after the last one each token sees; 0 gives zeros.
        pages: int32, pages of all rows.
        page_starts: int32 [B], where in ``pages`` those of the token's row begin.
        firsts: int64 [B], the first position each token sees, below its end; None for 0.
        stores: whether ``k`` and ``v`` belong at position ``ends - 1`` and are stored there first.  Otherwise they
            must be in the cache already.
    """

    def __init__(
        self,
        kernel: PagedDecodeKernel,
        ends: np.ndarray,
        pages: np.ndarray,
        page_starts: np.ndarray,
        firsts: np.ndarray | None = None,
        stores: bool = True,
    ) -> None:
        self._kernel = kernel
        lanes, tokens = kernel.lanes, ends.size
        if firsts is None:
            firsts = np.zeros_like(ends)
        blocks = -(-ends // lanes) - firsts // lanes
        costs = np.zeros(tokens + 1, np.int64)
        np.cumsum(blocks + 1, out=costs[1:])  # one more for what an item costs besides its length
        most = int(blocks.max(initial=0)) * lanes
        self._threads = torch.get_num_threads()
        scores = np.empty((self._threads, kernel.heads // kernel.kv_heads, most), np.float32)
        # The arrays are read through their addresses: they must live as long as the plan, and be dense.
        self._arrays = [np.ascontiguousarray(array) for array in (pages, page_starts, ends, firsts, costs, scores)]
        planned = (array.ctypes.data for array in self._arrays)
        self._arguments = words(*_OF_A_LAYER, *planned, tokens, most, int(stores))  # in the order of ARGUMENTS

    @classmethod
    def of_rows(
        cls,
        kernel: PagedDecodeKernel,
        kv_lens: np.ndarray,
        spans: np.ndarray,
        pages: np.ndarray,
        page_starts: np.ndarray,
        *,
        causal: bool,
        window: int | None,
    ) -> PagedDecode:
        """Rows of any number of query tokens, the last ``spans`` positions of each, whose keys are stored before.

        Args:
            kv_lens, spans: int64 [rows], tokens of each row with the new ones, and its query tokens.
            pages, page_starts: as above, but [rows].
            window: tokens a query sees up to its own position, itself included; None for all.
        """
        own_ends = np.repeat(kv_lens - np.cumsum(spans), spans) + np.arange(1, int(spans.sum()) + 1)
        ends = own_ends if causal else np.repeat(kv_lens, spans)
        return cls(kernel, ends, pages, np.repeat(page_starts, spans), first_seen(own_ends, window), stores=False)

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
        self._arguments[: len(_OF_A_LAYER)] = [*addresses, q.stride(0), k.stride(0), v.stride(0)]
        self._kernel.worker(self._arguments, self._threads)
        return out


def first_seen(own_ends: np.ndarray, window: int | None) -> np.ndarray | None:
    """The first position each token sees, int64 [n], for one that is the last before ``own_ends`` [n]; None for 0."""
    return None if window is None else np.maximum(own_ends - window, 0)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the heads of a row side by side; rows keep their stride."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
