"""The memory of a paged cache."""

from __future__ import annotations

import mmap
from math import prod

import numpy as np
import torch


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of ``shape``; on the CPU their pages become resident only when they are first written.

    ``torch.zeros`` writes a cache of gigabytes at load, which takes seconds and memory that few requests need.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def copy_pages(cache: torch.Tensor, sources: np.ndarray, targets: np.ndarray) -> None:
    """Copies pages ``sources`` [n] to ``targets`` [n] in every layer of ``cache`` [layers, pages, ...].

    All are read before any is written, so the two may overlap.
    """
    if sources.size:
        on_host = (torch.from_numpy(pages.astype(np.int64)) for pages in (sources, targets))
        read, written = (pages.to(cache.device, non_blocking=True) for pages in on_host)
        cache.index_copy_(1, written, cache.index_select(1, read))
