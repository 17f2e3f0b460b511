"""The linear layer of every projection: `y = x @ weight.T + bias`."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from mstar.kernels.panel_gemm import panel_kernel

Backend = Literal["auto", "panel", "torch"]

# Rows per kernel call: the inputs of a long prefill then stay in the L2 cache while the panels pass.
MAX_ROWS = 192


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, in], weight [out, in], bias [out] -> [n, out]; what `PackedLinear` must equal within float error."""
    return F.linear(x, weight, bias)


class PackedLinear:
    """A linear layer with its weight stored once, in the layout the device reads fastest.

    fp32 weights on a CPU with AVX2 or AVX-512 are packed in panels for the kernel in `panel_gemm.py`, with fp32
    accumulation; every other device and dtype keeps `weight` as it is and calls `torch.nn.functional.linear`.
    The packed copy does not share memory with `weight`, so a loader that drops `weight` holds one copy.
    Calls may come from several threads. No gradients.

        qkv = PackedLinear.fused([w_q, w_k, w_v])
        y = qkv(x)                      # x [n, in] -> [n, q + k + v]

    Args:
        weight: [out, in], a float dtype, which is the layer's; never modified.
        bias: [out] or None; converted to the weight's dtype.
        backend: "auto" takes the panel kernel where it can run, "panel" insists on it, "torch" never takes it.

    Raises:
        ValueError: shapes that do not fit, or backend "panel" where the kernel cannot run.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, backend: Backend = "auto") -> None:
        if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
            raise ValueError(f"weight: expected a float [out, in], got {weight.dtype} {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias: expected [{self.out_features}], got {list(bias.shape)}")
        if backend not in ("auto", "panel", "torch"):
            raise ValueError(f"backend: expected 'auto', 'panel' or 'torch', got {backend!r}")
        self.dtype = weight.dtype
        self.device = weight.device
        suits = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._kernel = panel_kernel() if suits and backend != "torch" else None
        if backend == "panel" and self._kernel is None:
            raise ValueError(
                "backend: 'panel' needs llvmlite, an x86 CPU with AVX2 and fp32 weights in its memory, "
                f"got {weight.dtype} on {weight.device}"
            )
        if self._kernel is None:
            self._weight = weight.detach()
            self._bias = None if bias is None else bias.detach().to(weight)
        else:
            self._weight = _pack(weight.detach(), self._kernel.panel)
            self._bias = torch.zeros(self._weight.shape[0] * self._kernel.panel)
            if bias is not None:
                self._bias[: self.out_features] = bias.detach()

    @classmethod
    def fused(
        cls,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] | None = None,
        backend: Backend = "auto",
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
        return cls(torch.cat(list(weights)), bias, backend)

    @property
    def backend(self) -> str:
        """What runs: "panel" or "torch"."""
        return "torch" if self._kernel is None else "panel"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] of the layer's dtype and device, any strides -> a new [n, out].

        Raises:
            ValueError: x of another shape, dtype or device (panel; the torch path raises torch's RuntimeError).
        """
        if self._kernel is None:
            return F.linear(x, self._weight, self._bias)
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype != torch.float32 or x.device != self.device:
            raise ValueError(
                f"x: expected float32 [n, {self.in_features}] on {self.device}, "
                f"got {x.dtype} {list(x.shape)} on {x.device}"
            )
        x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self.out_features)
        weight, bias, threads = self._weight.data_ptr(), self._bias.data_ptr(), torch.get_num_threads()
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
        panel = self._kernel.panel
        return self._weight[ids // panel, :, ids % panel]


def _pack(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """[out, in] -> [panels, in, panel], the last panel padded with zeros."""
    out_features, in_features = weight.shape
    full, rest = divmod(out_features, panel)
    packed = torch.empty(full + bool(rest), in_features, panel)
    packed[:full] = weight[: full * panel].reshape(full, panel, in_features).transpose(1, 2)
    if rest:
        packed[full, :, :rest] = weight[full * panel :].T
        packed[full, :, rest:] = 0
    return packed
