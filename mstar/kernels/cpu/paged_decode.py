"""Decode attention over a paged fp32 cache on the CPU: an LLVM kernel that reads keys and values where they lie.

One item is one row and one kv head: it stores the row's new key and value, then attends with all query heads of the
group, so that each stored vector is loaded once.  An item is never split, so its result depends on that row alone,
whatever the batch and the number of threads; threads take contiguous items of about equal total length.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from mstar.kernels.cpu.jit import Worker, make_or_warn, vector_lanes, words
from mstar.kernels.cpu.paged_decode_ir import ARGUMENTS, module_ir

_AT = {name: i for i, name in enumerate(ARGUMENTS)}


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
    """One planned step of one query token per row; :meth:`attend` is called once per layer.

    Args:
        kv_lens: int64 [B], tokens of each row, the new one included; at least 1.
        page_table: int32 [B, pages]; row ``i`` uses its first ``ceil(kv_lens[i] / page_size)`` entries.
        window: tokens a query sees, itself included; None for all.
    """

    def __init__(
        self, kernel: PagedDecodeKernel, kv_lens: np.ndarray, page_table: np.ndarray, window: int | None
    ) -> None:
        self._kernel = kernel
        lanes, rows = kernel.lanes, kv_lens.size
        firsts = np.zeros_like(kv_lens) if window is None else np.maximum(kv_lens - window, 0)
        blocks = -(-kv_lens // lanes) - firsts // lanes
        costs = np.zeros(rows + 1, np.int64)
        np.cumsum(blocks + 1, out=costs[1:])  # one more for what an item costs besides its length
        most = int(blocks.max(initial=0)) * lanes
        self._threads = torch.get_num_threads()
        scores = np.empty((self._threads, kernel.heads // kernel.kv_heads, most), np.float32)
        # The arrays are read through their addresses: they must live as long as the plan.
        self._arrays = (np.ascontiguousarray(page_table), np.ascontiguousarray(kv_lens), firsts, costs, scores)
        self._arguments = words(*[0] * len(ARGUMENTS))
        for name, array in zip(("pages", "lengths", "firsts", "costs", "scores"), self._arrays, strict=True):
            self._arguments[_AT[name]] = array.ctypes.data
        self._arguments[_AT["rows"]] = rows
        self._arguments[_AT["pages_stride"]] = page_table.shape[1]
        self._arguments[_AT["scores_stride"]] = most

    def attend(self, layer: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores k and v at each row's last position and attends.

        Args:
            layer: fp32 [pages, 2, page_size, Hkv, D], contiguous; written.
            q: fp32 [B, Hq, D]; k, v: fp32 [B, Hkv, D], any strides.  Scores are scaled by ``D ** -0.5``.

        Returns:
            A new fp32 [B, Hq, D].
        """
        q, k, v = _dense_heads(q), _dense_heads(k), _dense_heads(v)
        out = torch.empty(q.shape)
        addresses = [tensor.data_ptr() for tensor in (q, k, v, out, layer)]
        self._arguments[:8] = [*addresses, q.stride(0), k.stride(0), v.stride(0)]
        self._kernel.worker(self._arguments, self._threads)
        return out


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the heads of a row side by side; rows keep their stride."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
