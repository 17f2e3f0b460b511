"""Compiling and running the kernels that go over rows of one size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mstar.kernels.cpu.jit import Worker, make_or_warn, vector_lanes

ROWS_PER_THREAD = 16  # below, waking a thread costs more than it takes over


def row_kernel(what: str, dim: int, source: Callable[[int], str]) -> Worker | None:
    """The worker of ``source(lanes)``, for rows made of runs of ``dim`` fp32; None, with a warning that names
    ``what``, where it cannot be made."""

    def make() -> Worker:
        lanes = vector_lanes()
        if dim % lanes:
            raise OSError(f"runs of {dim} elements are no multiple of {lanes} lanes")
        return Worker(source(lanes))

    return make_or_warn(what, make)


def row_threads(rows: int) -> int:
    """Threads worth waking for so many rows."""
    return 1 if rows < ROWS_PER_THREAD else min(torch.get_num_threads(), rows // ROWS_PER_THREAD)
