"""The memory of a paged cache."""

from __future__ import annotations

import mmap
from math import prod

import torch


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of ``shape``; on the CPU their pages become resident only when they are first written.

    ``torch.zeros`` writes a cache of gigabytes at load, which takes seconds and memory that few requests need.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
