"""How weights lie in the panels of `panel_gemm.py`: as floats, or in the quantised blocks of a GGUF file.

A panel holds `panel` output features. It is a row of blocks; a block is its headers (scales, one fp16 per output) and
then, for each of its k, one step: the weights of all outputs at that k. Blocks stay as small as they are in the file
and are dequantised in registers. The values are exactly those of `gguf.quants.dequantize`: scale times integer has at
most 18 significant bits, so it is exact in fp32, and the minimum is added with one rounding.
Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mstar.kernels.cpu.ir import IrFunction

BLOCK = 32  # weights of one row in a quantised block
LOW_HALVES = 0x0F0F0F0F0F0F0F0F  # of eight bytes at a time


@dataclass(frozen=True)
class BlockRows:
    """Rows of a weight as a GGUF file stores them: `data` uint8 [out, blocks * bytes], `kind` a key of BLOCK_FORMATS.

    Raises:
        ValueError: another kind, or data that is no whole number of its blocks.
    """

    data: torch.Tensor
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in BLOCK_FORMATS:
            raise ValueError(f"kind: expected one of {', '.join(BLOCK_FORMATS)}, got {self.kind!r}")
        block_bytes, data = BLOCK_FORMATS[self.kind].file_bytes, self.data
        if data.dtype != torch.uint8 or data.dim() != 2 or 0 in data.shape or data.shape[1] % block_bytes:
            raise ValueError(f"data: expected uint8 [out, blocks * {block_bytes}], got {data.dtype} {list(data.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight."""
        return self.data.shape[0], self.data.shape[1] // BLOCK_FORMATS[self.kind].file_bytes * BLOCK


class PanelFormat(ABC):
    """A layout: packing, reading rows back, and the LLVM IR that turns a step into two vectors of floats.

    Attributes:
        headers: names of a block's headers, in order.
    """

    headers: tuple[str, ...] = ()

    @abstractmethod
    def pack(self, weight: Any, panel: int) -> torch.Tensor:
        """A weight [out, in] in the form the layout is made of -> its panels, the last one padded with zeros."""

    @abstractmethod
    def rows(self, packed: torch.Tensor, ids: torch.Tensor, panel: int) -> torch.Tensor:
        """Rows `ids` int64 [n] of what was packed, dequantised: fp32 [n, in]."""

    @abstractmethod
    def step_bytes(self, panel: int) -> int:
        """Bytes of a panel's weights at one k."""

    @abstractmethod
    def weights(self, f: IrFunction, step: Any, headers: Sequence[Any]) -> tuple[Any, Any]:
        """The step's weights as two vectors of floats; ``headers`` as :meth:`header_vectors` gives them."""

    def header_bytes(self, panel: int) -> int:
        """Bytes before the steps of a block."""
        return 2 * panel * len(self.headers)

    def header_vectors(self, f: IrFunction, block: Any) -> list[Any]:
        """The headers of a block as vectors of floats, two for each: those of the panel's halves."""
        starts = range(0, 2 * f.lanes * len(self.headers), f.lanes)
        return [f.b.fpext(f.vector(block, start, f.halves, align=2), f.floats) for start in starts]


class FloatPanels(PanelFormat):
    """fp32 weights [panels, in, panel]: one block without headers."""

    def step_bytes(self, panel: int) -> int:
        return 4 * panel

    def weights(self, f: IrFunction, step: Any, headers: Sequence[Any]) -> tuple[Any, Any]:
        return f.vector(step), f.vector(step, f.lanes)

    def pack(self, weight: torch.Tensor, panel: int) -> torch.Tensor:
        """[out, in] -> [panels, in, panel]."""
        weight = weight.detach()
        out_features, in_features = weight.shape
        full, rest = divmod(out_features, panel)
        packed = torch.empty(full + bool(rest), in_features, panel)
        packed[:full] = weight[: full * panel].reshape(full, panel, in_features).transpose(1, 2)
        if rest:
            packed[full, :, :rest] = weight[full * panel :].T
            packed[full, :, rest:] = 0
        return packed

    def rows(self, packed: torch.Tensor, ids: torch.Tensor, panel: int) -> torch.Tensor:
        return packed[ids // panel, :, ids % panel]


class BlockPanels(PanelFormat):
    """Quantised blocks: uint8 [panels, blocks, headers and steps], as many bytes as in the file.

    A step holds the integers of outputs 0 to panel - 1; with 4 bits each, byte i holds output i in its low half and
    output panel / 2 + i in its high half, so that each half of a panel unpacks into a vector of its own.
    """

    def __init__(self, bits: int, has_minimum: bool) -> None:
        """``bits`` 4 or 8; a weight is d * (q - 8), d * q with 8 bits, or d * q + m with ``has_minimum``."""
        self.bits, self.has_minimum = bits, has_minimum
        self.headers = ("d", "m") if has_minimum else ("d",)
        self.file_bytes = 2 * len(self.headers) + BLOCK * bits // 8

    def step_bytes(self, panel: int) -> int:
        return panel * self.bits // 8

    def weights(self, f: IrFunction, step: Any, headers: Sequence[Any]) -> tuple[Any, Any]:
        b = f.b
        if self.bits == 4:
            both = b.zext(f.vector(step, 0, f.bytes, align=1), f.ints)
            zero = f.fill(0 if self.has_minimum else 8, f.ints)
            halves = (b.and_(both, f.fill(15, f.ints)), b.lshr(both, f.fill(4, f.ints)))
            quants = [b.sub(half, zero) for half in halves]
        else:
            quants = [b.sext(f.vector(step, start, f.bytes, align=1), f.ints) for start in (0, f.lanes)]
        scales, values = headers[:2], [b.sitofp(quant, f.floats) for quant in quants]
        if self.has_minimum:
            first, second = (f.fma(*terms) for terms in zip(scales, values, headers[2:], strict=True))
        else:
            first, second = (b.fmul(*terms) for terms in zip(scales, values, strict=True))
        return first, second

    def pack(self, weight: BlockRows, panel: int) -> torch.Tensor:
        """[out, in] in blocks -> [panels, blocks, bytes]."""
        data = weight.data
        if missing := -len(data) % panel:
            data = F.pad(data, (0, 0, 0, missing))
        # One transposition of whole rows; all that follows then moves runs of `panel` bytes.
        blocks = data.view(-1, panel, data.shape[1]).transpose(1, 2).contiguous().unflatten(1, (-1, self.file_bytes))
        header_bytes = 2 * len(self.headers)
        scales, quants = blocks[:, :, :header_bytes], blocks[:, :, header_bytes:]  # each [panels, blocks, bytes, panel]
        packed = data.new_empty(*blocks.shape[:2], self.file_bytes * panel)
        headers, steps = self._parts(packed, panel)
        headers.view(torch.uint8).unflatten(-1, (panel, 2)).copy_(scales.unflatten(2, (-1, 2)).transpose(-1, -2))
        if self.bits == 8:
            steps.copy_(quants)
            return packed
        # In the file, byte i of a block holds its k = i in the low half and k = 16 + i in the high half.
        first, second = (half.view(torch.int64) for half in quants.split(panel // 2, dim=-1))
        low, high = steps.view(torch.int64).split(BLOCK // 2, dim=2)
        low.copy_((first & LOW_HALVES) | ((second & LOW_HALVES) << 4))
        high.copy_(((first >> 4) & LOW_HALVES) | (second & ~LOW_HALVES))
        return packed

    def rows(self, packed: torch.Tensor, ids: torch.Tensor, panel: int) -> torch.Tensor:
        headers, steps = self._parts(packed, panel)
        panels, outputs, width = ids // panel, ids % panel, steps.shape[-1]
        quants = steps[panels, :, :, outputs % width]  # [n, blocks, BLOCK]
        if self.bits == 8:
            values = quants.view(torch.int8).float()
        else:
            values = ((quants >> (outputs // width * 4).to(torch.uint8)[:, None, None]) & 15).float()
            values = values if self.has_minimum else values.sub_(8)
        scales = headers[panels, :, :, outputs].float().unsqueeze(-2).unbind(-1)  # each [n, blocks, 1]
        values = values.mul_(scales[0])
        return (values.add_(scales[1]) if self.has_minimum else values).flatten(1)

    def _parts(self, packed: torch.Tensor, panel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views: headers fp16 [panels, blocks, headers, panel], steps uint8 [panels, blocks, BLOCK, step bytes]."""
        headers, steps = packed.split([self.header_bytes(panel), BLOCK * self.step_bytes(panel)], dim=-1)
        return headers.view(torch.float16).unflatten(-1, (-1, panel)), steps.unflatten(-1, (BLOCK, -1))


FLOAT = FloatPanels()
BLOCK_FORMATS = {"Q4_0": BlockPanels(4, False), "Q4_1": BlockPanels(4, True), "Q8_0": BlockPanels(8, False)}
