"""Small random checkpoints, written as transformers and llama.cpp's converter write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")  # a GGUF of Mistral calls itself llama
DEFAULTS: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
}


def random_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A model of random float32 weights, norms and biases included."""
    config_class, model_class = CLASSES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**DEFAULTS | overrides)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.3)
            else:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in remove}))


def edit_tensors(folder: Path, remove: tuple[str, ...] = (), **changes: torch.Tensor) -> None:
    """Rewrites ``model.safetensors`` without or with tensors; ``__`` in a keyword stands for a dot."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if name not in remove}, file, {"format": "pt"})


def permute_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows as llama.cpp's converter orders them for the llama family."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: gguf.GGMLQuantizationType,
    *,
    skip: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    architecture: str | None = None,
    metadata: dict[str, int] | None = None,
) -> Path:
    """Exports ``model``; matrices as ``kind``, everything else as F32."""
    config = model.config
    arch = architecture or config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 64)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, config.model_type.upper()), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy()
        part = name.split(".")[-2]
        if config.model_type == "llama" and part in heads:
            values = permute_rows(values, heads[part])
        _add(writer, names.get_name(name, (".weight", ".bias")), values, kind)
    for name, values in (extra or {}).items():
        _add(writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantised(model: PreTrainedModel, kind: gguf.GGMLQuantizationType) -> PreTrainedModel:
    """``model`` with each matrix as it comes back from ``kind``: what a reader of the file must compute with."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                packed = gguf.quants.quantize(weight.numpy(), kind)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind).copy()))
    return model


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    if values.ndim < 2:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        return
    packed = gguf.quants.quantize(np.ascontiguousarray(values), kind)
    writer.add_tensor(name, packed, raw_dtype=kind)
