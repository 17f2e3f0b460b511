"""Random weights in the shapes that a configuration asks for: the engine's speed does not depend on their values."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from mstar.model.checkpoint import Checkpoint
from mstar.model.config import ModelConfig
from mstar.model.hf_folder import read_json
from mstar.model.tensor_source import TensorEntry, TensorSource

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Shape = tuple[int, ...]


class DummySource(TensorSource):
    """Makes each tensor where it is read into; the same one every time on one kind of device.

    Matrices are normal with a variance of 1 / inputs, so that activations and logits keep a size of about 1; norm
    weights lie around 1, biases around 0.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        stored = _stored_dtype(checkpoint)
        self.entries = {
            name: TensorEntry(shape, checkpoint.path, name, stored) for name, shape in text_shapes(checkpoint.config)
        }
        self._path = checkpoint.path

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if out.is_meta:
            return  # a shape has no weights
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(name.encode()))
        if out.dim() == 2:
            out.normal_(0.0, out.shape[-1] ** -0.5, generator=generator)
        elif name.endswith(".bias"):
            out.normal_(0.0, 0.1, generator=generator)
        else:
            out.uniform_(0.75, 1.25, generator=generator)

    def place_of(self, name: str) -> str:
        return f"{self._path}: tensor {name}"


def text_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Hugging Face names and shapes of every weight of a text model."""
    hidden, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", table
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", table
    layer = dict(_layer_shapes(config))
    for index in range(config.num_layers):
        for name, shape in layer.items():
            yield f"model.layers.{index}.{name}", shape


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (hidden,)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}.weight", (config.head_dim,)
    for name, rows, width, has_bias in (
        ("self_attn.q_proj", q_rows, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_rows, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        yield f"{name}.weight", (rows, width)
        if has_bias:
            yield f"{name}.bias", (rows,)


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """What config.json says the weights are in; None where it says nothing, or there is none."""
    if checkpoint.gguf is not None:
        return None
    raw = read_json(checkpoint.path / "config.json") or {}
    return DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype")))
