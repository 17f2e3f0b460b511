"""The projections of a decoder layer with what surrounds them: few kernels at few rows, cuBLAS and small ones at many.

References, with all shapes, in `mstar/kernels/fused_linears.py`.  Sums are fp32 and rounded once.  float32, and shapes
that no tile fits, take the library.  With `deterministic`, a row's result depends on that row alone, to the bit,
however many there are.

A `norm_weight` of None stands for one that was multiplied into the projection's weight:
`rms_norm(x, w) @ W.T = (x @ (W * w).T) / rms(x)`.  Then the division comes behind the product, with whatever else does,
and no kernel is spent on the norm; otherwise one is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mstar.kernels.cuda.linear_add import launch_linear_add_
from mstar.kernels.cuda.linear_choice import (
    add_tile,
    deterministic_tile,
    gate_up_tile,
    norm_linear_tile,
    qkv_tile,
)
from mstar.kernels.cuda.norm_linear import launch_norm_linear
from mstar.kernels.cuda.norm_qkv import launch_norm_qkv
from mstar.kernels.cuda.rope_store import qk_norm_rope_store
from mstar.kernels.cuda.row_ops import rms_norm, silu_mul
from mstar.kernels.cuda.streams import has_streams
from mstar.kernels.cuda.tiles import Tile
from mstar.kernels.linear import linear_in_blocks


def norm_qkv_rope_store(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    qk_norm_weight: torch.Tensor | None,
    qk_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_index: torch.Tensor,
    layer: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """As `fused_linears.norm_qkv_rope_store_reference`; all tensors contiguous.

    Returns:
        The rotated queries, a new [n, num_heads, head_dim]; keys and values are in `layer`.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    streams = has_streams(x.device)
    x, scale_eps = _normed_apart(x, norm_weight, eps)
    turns_whole = cos.shape[-1] == head_dim and head_dim & (head_dim - 1) == 0
    if not turns_whole:
        tile = None
    elif deterministic:
        tile = deterministic_tile(head_dim)
    else:
        tile = qkv_tile(rows, inputs, outputs, head_dim, has_qk_norm=qk_norm_weight is not None, streams=streams)
    if tile is not None and _runs(tile, x, weight) and head_dim % tile.columns == 0:
        return launch_norm_qkv(
            x, scale_eps, weight, bias, qk_norm_weight, qk_eps, cos, sin, key_index, layer,
            num_heads, num_kv_heads, head_dim, tile,
        )  # fmt: skip
    tile = None if deterministic else norm_linear_tile(rows, inputs, outputs, streams=streams)
    if tile is not None and _runs(tile, x, weight):
        heads = launch_norm_linear(x, scale_eps, weight, bias, tile)
        behind: dict[str, Any] = {}
    else:
        heads, behind = _linear(x, scale_eps, weight, bias, deterministic)
    return qk_norm_rope_store(
        heads.unflatten(-1, (-1, head_dim)), qk_norm_weight, qk_eps, cos, sin, key_index, layer,
        num_heads, num_kv_heads, **behind,
    )  # fmt: skip


def linear_add_(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> None:
    """As `fused_linears.linear_add_reference_`: `x` [n, out] += `y` [n, in] @ `weight`.T + `bias`; all contiguous."""
    outputs, inputs = weight.shape
    streams = has_streams(x.device)
    tile = deterministic_tile(32) if deterministic else add_tile(x.shape[0], inputs, outputs, streams=streams)
    if tile is not None and _runs(tile, y, weight):
        launch_linear_add_(x, y, weight, bias, tile)
    elif deterministic:
        x.add_(linear_in_blocks(y, weight, bias))
    else:
        x.addmm_(y, weight.t())
        if bias is not None:
            x.add_(bias)


def norm_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """As `fused_linears.norm_gate_up_reference`; all contiguous.

    Returns:
        A new [n, inner].
    """
    outputs, inputs = weight.shape
    streams = has_streams(x.device)
    x, scale_eps = _normed_apart(x, norm_weight, eps)
    tile = deterministic_tile(64) if deterministic else gate_up_tile(x.shape[0], inputs, outputs, streams=streams)
    if tile is not None and _runs(tile, x, weight):
        return launch_norm_linear(x, scale_eps, weight, bias, tile, is_gated=True)
    gate_up, behind = _linear(x, scale_eps, weight, bias, deterministic)
    return silu_mul(gate_up, **behind)


def _normed_apart(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, float | None]:
    """`x` as the projection takes it, and the `eps` of the division that is left to be done behind it, if it is.

    In float16, products of what is not divided yet could overflow on their way to the next kernel.
    """
    if norm_weight is None and x.dtype != torch.float16:
        return x, eps
    return rms_norm(x, norm_weight, eps), None


def _linear(
    x: torch.Tensor, eps: float | None, weight: torch.Tensor, bias: torch.Tensor | None, deterministic: bool
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The library's product, and keyword arguments for the kernel behind it: what is still to be done."""
    linear = linear_in_blocks if deterministic else F.linear
    if eps is None:
        return linear(x, weight, bias), {}
    return linear(x, weight, None), {"normed_x": x, "eps": eps, "bias": bias}


def _runs(tile: Tile, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the tile's kernel takes these: 16-bit floats, as tensor cores would round float32, and rows of 16 bytes
    that begin at a multiple of these."""
    outputs, inputs = weight.shape
    is_half = x.dtype == weight.dtype and x.element_size() == 2
    is_aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return x.shape[0] > 0 and is_half and is_aligned and tile.fits(inputs, outputs)
