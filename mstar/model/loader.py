"""Builds a decoder from a checkpoint's weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import nn

from mstar.kernels.linear import PackedLinear
from mstar.model.config import ModelConfig
from mstar.model.decoder import Decoder, DecoderLayer
from mstar.model.layers.attention import Attention
from mstar.model.layers.embedding import Embedding, TiedEmbedding
from mstar.model.layers.mlp import GatedMLP
from mstar.model.layers.norm import HeadNorm, RMSNorm
from mstar.model.weights import WeightReader

logger = logging.getLogger(__name__)
MakeLinear = Callable[..., PackedLinear]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_decoder(config: ModelConfig, weights: WeightReader, *, deterministic: bool = False) -> Decoder:
    """Reads every weight once, straight into the fused projections.

    Args:
        deterministic: of all linear layers, see :class:`PackedLinear`.

    Raises:
        LoadError: a tensor is missing, of another shape, cut short, or unknown; names the file and the tensor.
    """
    packed = functools.partial(PackedLinear, deterministic=deterministic)
    embedding, head = _load_ends(config, weights, packed)
    make_layer = _layer_of(weights.device, weights.dtype, deterministic)
    layers = [make_layer(*_load_layer(config, weights, index, packed)) for index in range(config.num_layers)]
    norm = RMSNorm(weights.read("model.norm.weight", config.hidden_size), config.rms_norm_eps)
    weights.finish()
    return Decoder(embedding, layers, norm, head)


def _layer_of(device: torch.device, dtype: torch.dtype, deterministic: bool) -> Callable[..., nn.Module]:
    if device.type == "cuda":
        from mstar.model.layers.fused import FUSED_DTYPES, FusedDecoderLayer  # needs Triton

        if dtype in FUSED_DTYPES:
            return functools.partial(FusedDecoderLayer, deterministic=deterministic)
    return DecoderLayer


def _load_ends(
    config: ModelConfig, weights: WeightReader, packed: MakeLinear
) -> tuple[Embedding | TiedEmbedding, PackedLinear]:
    """Embedding and head.  A stored head that differs from the embedding wins over the tie, as in transformers."""
    shape = (config.vocab_size, config.hidden_size)
    if config.tie_word_embeddings and HEAD not in weights:
        head = packed(weights.read_linear([(EMBEDDING, shape)]))
        return TiedEmbedding(head), head
    table = weights.read(EMBEDDING, *shape)
    if not config.tie_word_embeddings:
        return Embedding(table), packed(weights.read_linear([(HEAD, shape)]))
    stored = weights.read(HEAD, *shape)
    if not torch.equal(stored, table):
        logger.warning("tie_word_embeddings is true but %s differs from the embedding: the stored head is used", HEAD)
    return Embedding(table), packed(stored)


def _load_layer(
    config: ModelConfig, weights: WeightReader, index: int, packed: MakeLinear
) -> tuple[RMSNorm, Attention, RMSNorm, GatedMLP]:
    """The parts of one layer, in their order."""
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(weights.read(f"{prefix}{name}.weight", size), config.rms_norm_eps)

    def linear(names: dict[str, int], width: int, has_bias: bool) -> PackedLinear:
        weight = weights.read_linear([(f"{prefix}{name}.weight", (rows, width)) for name, rows in names.items()])
        bias = None
        if has_bias:
            bias = weights.read_stacked([(f"{prefix}{name}.bias", (rows,)) for name, rows in names.items()])
        return packed(weight, bias)

    heads = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
    attention = Attention(
        qkv=linear(heads, hidden, config.qkv_bias),
        out=linear({"self_attn.o_proj": hidden}, q_rows, config.o_bias),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qk_norm=_head_norm(config, weights, prefix) if config.qk_norm else None,
    )
    mlp = GatedMLP(
        gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
    )
    return norm("input_layernorm", hidden), attention, norm("post_attention_layernorm", hidden), mlp


def _head_norm(config: ModelConfig, weights: WeightReader, prefix: str) -> HeadNorm:
    """One weight row per query and key head, from the row that all query (key) heads share."""
    q, k = (weights.read(f"{prefix}self_attn.{name}.weight", config.head_dim) for name in ("q_norm", "k_norm"))
    return HeadNorm(torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1))), config.rms_norm_eps)
