"""How a projection is cut over programs, and which cut suits a shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton

from mstar.kernels.cuda.pdl import launch_options

# Leave room for the next kernel's programs beside this one's, and are more than the assembler would take by itself: it
# would rather wait for one load before it starts the next.
MAX_REGISTERS = 128


@dataclass(frozen=True)
class Tile:
    """One way to compute a projection (`products.py`); a program has `rows` x `columns` outputs.

    `columns` counts outputs of the product: with a gate or rotated pairs, half as many come out.
    """

    way: Literal["vector", "whole", "loop"]
    rows: int
    columns: int
    chunk: int
    """Inputs per step, per slice."""
    warps: int
    slices: int = 1
    stages: int = 1
    splits: int = 1
    """Programs that share an output's inputs ("loop" of `linear_add_` only); another kernel adds what they give."""
    release: Literal["start", "waited", "product", "end"] = "start"
    """When the next kernel may be put beside this one's programs.  From the start, several kernels stand in line, which
    large programs cannot afford: a later kernel's then crowd on the multiprocessors that are left."""
    prefetches: bool = True
    """Brings the weights to L2 while the kernel before runs."""

    def fits(self, inputs: int, outputs: int) -> bool:
        """Whether this cut covers [outputs, inputs] without a remainder that it cannot mask."""
        if self.way == "vector":  # 16-byte loads of whole rows of lanes
            return outputs % self.columns == 0 and inputs % self.chunk == 0 and self.chunk >= 16
        return outputs % self.columns == 0 and inputs % (16 * self.splits) == 0

    def options(self, x: torch.Tensor, inputs: int) -> dict[str, Any]:
        """Keyword arguments of a launch: the tile's constants and Triton's own."""
        step = self.slices * self.chunk
        left = inputs % step
        rest = max(16, triton.next_power_of_2(math.ceil(left / self.slices))) if left and self.way == "whole" else 0
        prefetches = x.is_cuda and self.prefetches
        return launch_options(
            x,
            WAY=self.way,
            M=self.rows,
            N=self.columns,
            SLICES=self.slices,
            CHUNK=self.chunk,
            REST=rest,
            PREFETCH=self._prefetch_parts(inputs // self.splits * x.element_size()) if prefetches else 0,
            RELEASE=self.release,
            num_warps=self.warps,
            num_stages=self.stages,
            **({} if self.way == "loop" else {"maxnreg": MAX_REGISTERS}),
        )

    def _prefetch_parts(self, row_bytes: int) -> int:
        if self.way == "vector":  # all loads are under way at once
            return 0
        parts = max(1, 32 * self.warps // self.columns)
        while row_bytes % (16 * parts):
            parts //= 2
        return parts
