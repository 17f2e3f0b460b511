"""A decoder layer's projections with what surrounds them, as plain torch operators.

These say what the kernels of `mstar/kernels/cuda` of the same names must equal within float error, and run wherever
torch does.  They round to the activations' dtype after every operator; the kernels round once, at their end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mstar.kernels.rope import rotate_reference


def norm_qkv_rope_store_reference(
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
) -> torch.Tensor:
    """RMS norm, the packed q/k/v projection, then :func:`qk_norm_rope_store_reference` on its heads.

    Args:
        x: [n, hidden], only read.
        norm_weight: [hidden], or None where it is part of `weight`.
        weight: [(num_heads + 2 * num_kv_heads) * head_dim, hidden], queries first, then keys, then values.
        bias: [(num_heads + 2 * num_kv_heads) * head_dim] or None.

    Returns:
        The rotated queries [n, num_heads, head_dim].
    """
    heads = F.linear(F.rms_norm(x, x.shape[-1:], norm_weight, eps), weight, bias).unflatten(-1, (-1, head_dim))
    return qk_norm_rope_store_reference(
        heads, qk_norm_weight, qk_eps, cos, sin, key_index, layer, num_heads, num_kv_heads
    )


def qk_norm_rope_store_reference(
    heads: torch.Tensor,
    qk_norm_weight: torch.Tensor | None,
    qk_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_index: torch.Tensor,
    layer: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Norm of queries and keys, their rotation, and the store of keys and values in a layer of the paged cache.

    Args:
        heads: [n, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        qk_norm_weight: [num_heads + num_kv_heads, head_dim], or None for no norm.
        cos, sin: [n, 1, rotary_dim] from :func:`mstar.kernels.rope.cos_sin`, not interleaved.
        key_index: int64 [n], the row of `layer` seen as [pages * 2 * page_size, num_kv_heads, head_dim] where a
            token's key goes; its value goes `page_size` rows further.
        layer: [pages, 2, page_size, num_kv_heads, head_dim], written.

    Returns:
        The rotated queries [n, num_heads, head_dim].
    """
    turned, values = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if qk_norm_weight is not None:
        turned = F.rms_norm(turned, turned.shape[-1:], None, qk_eps) * qk_norm_weight
    turned = rotate_reference(turned.to(cos.dtype), cos, sin, False).to(heads.dtype)
    queries, keys = turned.split((num_heads, num_kv_heads), dim=1)
    cache = layer.view(-1, *layer.shape[3:])
    cache[key_index] = keys
    cache[key_index + layer.shape[2]] = values
    return queries.contiguous()


def linear_add_reference_(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """`x += y @ weight.T + bias` in place.

    Args:
        x: [n, out], overwritten.
        y: [n, in].
        weight: [out, in].
        bias: [out] or None.
    """
    x.add_(F.linear(y, weight, bias))


def norm_gate_up_reference(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`silu(gate) * up`, where `gate` and `up` are the halves of `rms_norm(x) @ weight.T + bias`.

    Args:
        x: [n, hidden], only read.
        norm_weight: [hidden], or None where it is part of `weight`.
        weight: [2 * inner, hidden], the gate's rows first.
        bias: [2 * inner] or None.

    Returns:
        [n, inner].
    """
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], norm_weight, eps), weight, bias).chunk(2, dim=-1)
    return F.silu(gate) * up
