"""A decoder layer of few kernels, for GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mstar.kernels.cuda import linears
from mstar.kernels.linear import PackedLinear
from mstar.model.layers.attention import Attention
from mstar.model.layers.mlp import GatedMLP
from mstar.model.layers.norm import RMSNorm

FUSED_DTYPES = (torch.bfloat16, torch.float16)
FOLDED_ROWS = 4096  # at once, in fp32


class FusedDecoderLayer(nn.Module):
    """What :class:`mstar.model.decoder.DecoderLayer` computes, in five launches of a decode step:

    norm, query/key/value projection, norm per head, rotation and store of keys and values; attention; output
    projection on top of the residual; norm, gate and up projection, SwiGLU; down projection on top of the residual.
    The residual is updated in place.
    """

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        *,
        deterministic: bool = False,
    ) -> None:
        """Takes the parts of a layer over: the norms' weights may be multiplied into the projections behind them.

        ``deterministic``: as of :class:`mstar.kernels.linear.PackedLinear`.
        """
        super().__init__()
        self._attention_norm = fold_norm(attention_norm, attention.qkv)
        self._mlp_norm = fold_norm(mlp_norm, mlp.gate_up)
        self._eps = attention_norm.eps, mlp_norm.eps
        self._qkv, self._out = attention.qkv, attention.out
        self._gate_up, self._down = mlp.gate_up, mlp.down
        self.qk_norm = attention.qk_norm
        self._num_heads = attention.num_heads
        self._num_kv_heads = attention.num_qk_heads - attention.num_heads
        self._head_dim = attention.head_dim
        self._deterministic = deterministic

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, attn: Any, rope: Any, only_last: bool
    ) -> tuple[torch.Tensor, None]:
        """As :meth:`mstar.model.decoder.DecoderLayer.forward`; nothing is left to be added (``delta`` is None)."""
        assert delta is None
        deterministic = self._deterministic
        layer, key_index = attn.next_layer()
        cos, sin = rope.tables()
        q = linears.norm_qkv_rope_store(
            x,
            self._attention_norm,
            self._eps[0],
            *_of(self._qkv),
            None if self.qk_norm is None else self.qk_norm.weight,
            0.0 if self.qk_norm is None else self.qk_norm.eps,
            cos,
            sin,
            key_index,
            layer,
            self._num_heads,
            self._num_kv_heads,
            self._head_dim,
            deterministic=deterministic,
        )
        heads = attn.attend_stored(q).flatten(1)
        if only_last:
            x, heads = attn.last_rows(x), attn.last_rows(heads)
        linears.linear_add_(x, heads, *_of(self._out), deterministic=deterministic)
        hidden = linears.norm_gate_up(x, self._mlp_norm, self._eps[1], *_of(self._gate_up), deterministic=deterministic)
        linears.linear_add_(x, hidden, *_of(self._down), deterministic=deterministic)
        return x, None


def fold_norm(norm: RMSNorm, linear: PackedLinear) -> torch.Tensor | None:
    """Multiplies the norm's weight into ``linear``'s, in place, rounded once: then only a division is left of the norm.

    Returns:
        The norm's weight where it must stay apart, which is float16: products of inputs that are not divided yet may
        overflow there.  None where it is in ``linear``.
    """
    if linear.dtype == torch.float16:
        return norm.weight
    weight = linear.weight
    for rows in weight.split(FOLDED_ROWS):
        rows.copy_(rows.float() * norm.weight.float())
    return None


def _of(linear: PackedLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
    return linear.weight, linear.bias
