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
# Of a stream's warps; those that ask and square leave most of theirs to those that multiply.
MAX_STREAM_REGISTERS = 168
# Of a multiprocessor, on Hopper.
REGISTERS = 65536
SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class Tile:
    """One way to compute a projection; a program has `rows` x `columns` outputs.

    "stream" is described in `streams.py`, the other ways in `products.py`.
    `columns` counts outputs of the product: with a gate or rotated pairs, half as many come out.
    """

    way: Literal["vector", "whole", "loop", "stream"]
    rows: int
    columns: int
    chunk: int
    """Inputs per step, per slice."""
    warps: int
    slices: int = 1
    stages: int = 1
    splits: int = 1
    """Programs that share an output's inputs ("loop" of `linear_add_` only); another kernel adds what they give."""
    release: Literal["start", "waited"] = "start"
    """When the next kernel may be put beside this one's programs; in a "stream", once these have waited.  From the
    start, several kernels stand in line, which large programs cannot afford: a later kernel's then crowd on the
    multiprocessors that are left."""

    def fits(self, inputs: int, outputs: int) -> bool:
        """Whether this cut covers [outputs, inputs] without a remainder that it cannot mask."""
        if self.way == "vector":  # 16-byte loads of whole rows of lanes
            return outputs % self.columns == 0 and inputs % self.chunk == 0 and self.chunk >= 16
        if self.way == "stream":
            return outputs % self.columns == 0 and inputs % 8 == 0 and self._can_stream(inputs)
        return outputs % self.columns == 0 and inputs % (16 * self.splits) == 0

    def options(self, x: torch.Tensor, inputs: int) -> dict[str, Any]:
        """Keyword arguments of a launch: the tile's constants and Triton's own."""
        step = self.slices * self.chunk
        left = inputs % step
        rest = max(16, triton.next_power_of_2(math.ceil(left / self.slices))) if left and self.way == "whole" else 0
        return launch_options(
            x,
            WAY=self.way,
            M=self.rows,
            N=self.columns,
            SLICES=self.slices,
            CHUNK=self.chunk,
            REST=rest,
            PREFETCH=self._prefetch_parts(inputs // self.splits * x.element_size()) if x.is_cuda else 0,
            RELEASE=self.release,
            num_warps=self.warps,
            num_stages=self.stages,
            **({} if self.way == "loop" else {"maxnreg": MAX_REGISTERS}),
        )

    def _can_stream(self, inputs: int) -> bool:
        """One block is asked for while another is read."""
        has_two = self.stages > 1 or inputs <= self.chunk
        return has_two and self.splits == 1 and self.stream_bytes(inputs) <= SHARED_BYTES

    def stream_stages(self, inputs: int) -> int:
        """Blocks of x and of the weight that a "stream" has room for."""
        return min(self.stages, triton.cdiv(inputs, self.chunk))

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage of a "stream": blocks of x and of the weight, 16-bit floats, and two barriers."""
        return 2 * self.chunk * (self.rows + self.columns) + 16

    def stream_bytes(self, inputs: int) -> int:
        """Shared memory of a "stream", with sums of squares."""
        return self.stream_stages(inputs) * self.stage_bytes + 4 * self.rows

    def stream_options(self, x: torch.Tensor, inputs: int, *, has_squares: bool) -> dict[str, Any]:
        """As `options`, of a "stream", some with warps for squares of x.

        Registers are shared among the programs that shared memory has room for, as far as these can do with them.
        """
        threads = 32 * (self.warps + (8 if has_squares else 4))  # those of a stream's tasks come in fours
        programs = SHARED_BYTES // self.stream_bytes(inputs)
        registers = REGISTERS // (programs * threads) // 8 * 8
        return launch_options(
            x,
            M=self.rows,
            N=self.columns,
            COUNT=triton.cdiv(inputs, self.chunk),
            STAGES=self.stream_stages(inputs),
            num_warps=self.warps,
            maxnreg=min(max(MAX_REGISTERS, registers), MAX_STREAM_REGISTERS),
        )

    def _prefetch_parts(self, row_bytes: int) -> int:
        if self.way == "vector":  # all loads are under way at once
            return 0
        parts = max(1, 32 * self.warps // self.columns)
        while row_bytes % (16 * parts):
            parts //= 2
        return parts
