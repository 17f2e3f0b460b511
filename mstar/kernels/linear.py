"""The linear layer of every projection: `y = x @ weight.T + bias`."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from mstar.kernels.cpu.panel_formats import BLOCK_FORMATS, FLOAT, BlockRows, PanelFormat
from mstar.kernels.cpu.panel_gemm import panel_kernel

Backend = Literal["auto", "panel", "torch"]

# Rows per kernel call: the inputs of a long prefill then stay in the L2 cache while the panels pass.
MAX_ROWS = 192
# Rows per product of the deterministic torch path: 8 to 64 give every row the same bits wherever it stands.
BLOCK_ROWS = 32


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, in], weight [out, in], bias [out] -> [n, out]; what `PackedLinear` must equal within float error."""
    return F.linear(x, weight, bias)


@torch.library.custom_op("mstar::linear_in_blocks", mutates_args=())
def linear_in_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `linear_reference`, in products of `BLOCK_ROWS` rows, the last one padded: a row's bits depend on it alone.

    BLAS sums in another order for other shapes: fp32 below 16 rows and, over several threads, also where it splits the
    sum (57 to 192 rows of 1,536 inputs); bf16 at most sizes.
    """
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % BLOCK_ROWS)).contiguous()
    y = x.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, rows, BLOCK_ROWS):
        y[start : start + BLOCK_ROWS] = F.linear(padded[start : start + BLOCK_ROWS], weight, bias)
    return y[:rows]


@linear_in_blocks.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def takes_blocks(kind: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `PackedLinear` can compute in `dtype` on `device` from `BlockRows` of this GGML type."""
    suits = kind in BLOCK_FORMATS and dtype == torch.float32 and device.type == "cpu"
    return suits and panel_kernel(BLOCK_FORMATS[kind]) is not None


class PackedLinear:
    """A linear layer with its weight stored once, in the layout the device reads fastest.

    fp32 weights on a CPU with AVX2 or AVX-512 are packed in panels for the kernel in `panel_gemm.py`, with fp32
    accumulation; every other device and dtype keeps `weight` as it is and calls `torch.nn.functional.linear`.
    Quantised blocks stay quantised, and give bit for bit what the panel kernel gives on their fp32 values.
    The packed copy does not share memory with `weight`, so a loader that drops `weight` holds one copy.
    With `deterministic`, a row's result depends on that row alone, to the bit, however many there are; the panel kernel
    gives that always.
    Calls may come from several threads. No gradients.

        qkv = PackedLinear.fused([w_q, w_k, w_v])
        y = qkv(x)                      # x [n, in] -> [n, q + k + v]

    Args:
        weight: [out, in], a float dtype, which is the layer's, or blocks, whose layer is fp32; never modified.
        bias: [out] or None; converted to the weight's dtype.
        backend: "auto" takes the panel kernel where it can run, "panel" insists on it, "torch" never takes it.
        deterministic: rows keep their bits, whatever the number of rows.

    Raises:
        ValueError: shapes that do not fit, or backend "panel" or blocks where the kernel cannot run.
    """

    def __init__(
        self,
        weight: torch.Tensor | BlockRows,
        bias: torch.Tensor | None = None,
        backend: Backend = "auto",
        deterministic: bool = False,
    ) -> None:
        panels: PanelFormat = FLOAT
        if isinstance(weight, BlockRows):
            self.dtype, self.device, panels = torch.float32, weight.data.device, BLOCK_FORMATS[weight.kind]
        elif weight.dim() == 2 and weight.is_floating_point() and 0 not in weight.shape:
            self.dtype, self.device = weight.dtype, weight.device
        else:
            raise ValueError(f"weight: expected a float [out, in], got {weight.dtype} {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias: expected [{self.out_features}], got {list(bias.shape)}")
        if backend not in ("auto", "panel", "torch"):
            raise ValueError(f"backend: expected 'auto', 'panel' or 'torch', got {backend!r}")
        suits = self.device.type == "cpu" and self.dtype == torch.float32
        self._kernel = panel_kernel(panels) if suits and backend != "torch" else None
        if self._kernel is None and (backend == "panel" or isinstance(weight, BlockRows)):
            raise ValueError(
                "backend: 'panel', which blocks need, takes llvmlite, an x86 CPU with AVX2 and fp32 weights or blocks "
                f"in its memory, got {backend!r}, {self.dtype} on {self.device}"
            )
        self._linear = linear_in_blocks if deterministic else F.linear
        if self._kernel is None:
            assert isinstance(weight, torch.Tensor)
            self._weight = weight.detach()
            self._bias: torch.Tensor | None = None if bias is None else bias.detach().to(weight)
        else:
            self._weight = panels.pack(weight, self._kernel.panel)
            self._bias = torch.zeros(self._weight.shape[0] * self._kernel.panel)
            if bias is not None:
                self._bias[: self.out_features] = bias.detach()

    @classmethod
    def fused(
        cls,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] | None = None,
        backend: Backend = "auto",
        deterministic: bool = False,
    ) -> "PackedLinear":
        """One layer whose output is the outputs of `weights` ([out_i, in] each) side by side.

        Args:
            weights: at least one; all of one dtype, device and input size.
            biases: one [out_i] or None per weight; a missing one counts as zeros.

        Raises:
            ValueError: another number of biases than of weights, or weights that do not fit together.
        """
        if biases is not None and len(biases) != len(weights):
            raise ValueError(f"biases: expected {len(weights)}, one per weight, got {len(biases)}")
        if len({(w.dtype, w.device, w.shape[1:]) for w in weights}) != 1:
            raise ValueError(
                "weights: expected one dtype, device and input size, got "
                + ", ".join(f"{w.dtype} {list(w.shape)} on {w.device}" for w in weights)
            )
        bias = None
        if biases is not None and any(b is not None for b in biases):
            bias = torch.cat(
                [w.new_zeros(len(w)) if b is None else b.to(w) for w, b in zip(weights, biases, strict=True)]
            )
        return cls(torch.cat(list(weights)), bias, backend, deterministic)

    @property
    def backend(self) -> str:
        """What runs: "panel" or "torch"."""
        return "torch" if self._kernel is None else "panel"

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], for kernels that fuse more than the product.  Backend "torch" only."""
        assert self._kernel is None, "packed in panels"
        return self._weight

    @property
    def bias(self) -> torch.Tensor | None:
        """[out].  Backend "torch" only."""
        assert self._kernel is None, "packed in panels"
        return self._bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] of the layer's dtype and device, any strides -> a new [n, out].

        Raises:
            ValueError: x of another shape, dtype or device (panel; the torch path raises torch's RuntimeError).
        """
        if self._kernel is None:
            return self._linear(x, self._weight, self._bias)
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype != torch.float32 or x.device != self.device:
            raise ValueError(
                f"x: expected float32 [n, {self.in_features}] on {self.device}, "
                f"got {x.dtype} {list(x.shape)} on {x.device}"
            )
        assert self._bias is not None
        x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self.out_features)
        threads = torch.get_num_threads()
        scratch = torch.empty(self._kernel.scratch_size(self.in_features, threads))
        weight, bias, scratch_address = self._weight.data_ptr(), self._bias.data_ptr(), scratch.data_ptr()
        x_address, y_address = x.data_ptr(), y.data_ptr()
        for start in range(0, rows, MAX_ROWS):
            self._kernel(
                x_address + 4 * start * self.in_features,
                weight,
                bias,
                y_address + 4 * start * self.out_features,
                min(MAX_ROWS, rows - start),
                self.in_features,
                self.out_features,
                scratch_address,
                threads,
            )
        return y

    def weight_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, so that a tied head also serves as the embedding table.

        Args:
            ids: int64 [n] on the layer's device, 0 <= id < out; a larger one raises IndexError or reads padding.

        Returns:
            [n, in], a copy.
        """
        if self._kernel is None:
            return self._weight[ids]
        return self._kernel.format.rows(self._weight, ids, self._kernel.panel)
