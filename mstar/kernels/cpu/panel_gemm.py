"""fp32 matrix product for few rows on CPUs: an LLVM kernel made at load, run on torch's own OpenMP threads.

BLAS libraries tile for square products and reach a half to a third of the memory bandwidth between 2 and 64 rows.
This kernel reads each weight once, as one stream per thread. The weight is stored in panels of `panel` output
features, k after k; a tile of up to `tile_rows` input rows times one panel stays in registers while k runs. When there
are several tiles, each fetches its share of the next panel, so memory and arithmetic overlap. Quantised panels
(`panel_formats.py`) are dequantised in registers by a single tile, into a scratch copy of the panel for several.
Every output adds its products in the order of k, so neither the format nor the number of rows changes a bit of it.
"""

import functools

from mstar.kernels.cpu.jit import Worker, make_or_warn, vector_lanes, words
from mstar.kernels.cpu.panel_formats import FLOAT, PanelFormat
from mstar.kernels.cpu.panel_ir import module_ir


class PanelKernel:
    """The compiled kernel of this machine for weights of one format.

    Attributes:
        format: how its weights are packed.
        panel: output features per panel (two vector registers): 32 with AVX-512, 16 with AVX2.
    """

    def __init__(self, weights: PanelFormat) -> None:
        lanes = vector_lanes()
        self.format, self.panel, self._tile_rows = weights, 2 * lanes, 12 if lanes == 16 else 6
        self._worker = Worker(module_ir(weights, lanes, self._tile_rows))

    def __call__(
        self,
        x: int,
        weight: int,
        bias: int,
        y: int,
        rows: int,
        in_features: int,
        out_features: int,
        scratch: int,
        threads: int,
    ) -> None:
        """y = x @ weight.T + bias.

        Args:
            x: address of fp32 [rows, in_features], contiguous; rows >= 1, in_features >= 1.
            weight: address of the weight as the format packed it.
            bias: address of fp32 [panels * panel].
            y: address of fp32 [rows, out_features], contiguous; written.
            scratch: address of `scratch_size` fp32 values.
            threads: OpenMP threads, the caller among them.
        """
        self._worker(words(x, weight, bias, y, rows, in_features, out_features, scratch), threads)

    def scratch_size(self, in_features: int, threads: int) -> int:
        """fp32 values that a call may overwrite: one panel per thread, for quantised panels that meet several tiles.

        The same for any number of rows, so that a step's allocations do not tell its rows.
        """
        return 0 if self.format is FLOAT else threads * in_features * self.panel


def panel_kernel(weights: PanelFormat = FLOAT) -> PanelKernel | None:
    """A format's kernel, compiled once per process in about 0.2 s; None, with a warning, where it cannot be made."""
    return _make(weights)


@functools.cache
def _make(weights: PanelFormat) -> PanelKernel | None:
    return make_or_warn("the linear layers", lambda: PanelKernel(weights))
