"""Metadata of a GGUF file, read into a :class:`ModelConfig`, and the names its tensors have in it."""

from __future__ import annotations

import logging
import re
from typing import Any

from mstar.model.config import ModelConfig, read_float, read_ids, read_int
from mstar.model.families import Family, family_of_gguf
from mstar.model.gguf_file import GGUFFile
from mstar.model.rope import context_length, llama3_scaling_of, parse_rope_scaling
from mstar.utils.errors import LoadError

logger = logging.getLogger(__name__)
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of sequence, of turn, of message
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HF_PARTS = {part: block for block, part in BLOCK_NAMES.items()}
HF_TOP_NAMES = {hf: gguf for gguf, hf in TOP_NAMES.items()}
SCALING_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
ROPE_FACTORS = "rope_freqs.weight"
IGNORED = frozenset({ROPE_FACTORS})  # read by the configuration, no weight of a layer


def hf_name(name: str) -> str:
    """A GGUF tensor's name in Hugging Face's spelling; names without one stay as they are."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{BLOCK_NAMES[part]}.{kind}" if part in BLOCK_NAMES else name
    return TOP_NAMES.get(name, name)


def gguf_name(name: str) -> str:
    """The GGUF spelling of a Hugging Face name: the inverse of :func:`hf_name`."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"blk.{layer}.{HF_PARTS[part]}.{kind}" if part in HF_PARTS else name
    return HF_TOP_NAMES.get(name, name)


def config_from_gguf(file: GGUFFile) -> tuple[ModelConfig, Family]:
    """The configuration of an opened file, and its family.

    Biases are there if their tensors are.  Without ``output.weight`` the embedding is the head.

    Raises:
        LoadError: unknown architecture, experts, another rotary scaling than the known ones, windowed attention in
            some layers only, or a missing or malformed number; names the file and the key or tensor.
    """
    meta, path = file.metadata, str(file.path)
    arch = meta.get("general.architecture")
    family = family_of_gguf(arch, path)
    if meta.get(f"{arch}.expert_count"):
        raise LoadError(f"{path}: {arch}.expert_count: mixtures of experts are not supported")

    def get_int(key: str, default: int | None = None) -> int:
        return read_int(meta, f"{arch}.{key}", path, default)

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise LoadError(f"{path}: tensor token_embd.weight is missing")
    hidden, heads = get_int("embedding_length"), get_int("attention.head_count")
    head_dim = get_int("attention.key_length", max(hidden // heads, 1))
    theta = read_float(meta, f"{arch}.rope.freq_base", path, 10000.0)
    positions = get_int("context_length")
    scaling = parse_rope_scaling(_scaling_of(meta, f"{arch}.rope.scaling."), positions, path)
    rotary_dim = get_int("rope.dimension_count", head_dim)
    if scaling is None and ROPE_FACTORS in file.tensors:
        scaling = _scaling_of_factors(file, theta, rotary_dim)
    bos = read_ids(meta, "tokenizer.ggml.bos_token_id", path)
    qkv_bias = family.qkv_bias or "blk.0.attn_q.bias" in file.tensors
    config = ModelConfig(
        family=family.name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=get_int("feed_forward_length"),
        num_layers=get_int("block_count"),
        num_heads=heads,
        num_kv_heads=get_int("attention.head_count_kv", heads),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rms_norm_eps=read_float(meta, f"{arch}.attention.layer_norm_rms_epsilon", path),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        context_length=context_length(positions, scaling),
        sliding_window=_sliding_window_of(meta, f"{arch}.attention.sliding_window", path),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=qkv_bias,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=family.qk_norm,
        eos_ids=eos_ids_of(meta, path),
        bos_id=min(bos, default=None),
    )
    return config.check(path), family


def eos_ids_of(meta: dict[str, Any], path: str) -> frozenset[int]:
    """All end-of-sequence, end-of-turn and end-of-message ids of the tokenizer's metadata."""
    return frozenset().union(*(read_ids(meta, f"tokenizer.ggml.{key}", path) for key in EOS_KEYS))


def _scaling_of(meta: dict[str, Any], prefix: str) -> dict[str, Any] | None:
    kind = meta.get(prefix + "type")
    if kind in (None, "none"):
        return None
    raw = {name: meta[prefix + key] for name, key in SCALING_KEYS.items() if prefix + key in meta}
    return {"rope_type": kind, **raw}


def _sliding_window_of(meta: dict[str, Any], key: str, path: str) -> int | None:
    if f"{key}_pattern" in meta:
        raise LoadError(f"{path}: {key}_pattern: sliding windows in some layers only are not supported")
    return read_int(meta, key, path) if meta.get(key) else None


def _scaling_of_factors(file: GGUFFile, theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """The Llama 3 scaling that the file's frequency divisors stand for; None, with a log line, for any others."""
    factors = file.read_floats(ROPE_FACTORS)
    scaling = llama3_scaling_of(factors, theta, rotary_dim)
    if scaling is None and any(factor != 1.0 for factor in factors):
        logger.warning("%s: tensor %s holds no Llama 3 rotary scaling and is ignored", file.path, ROPE_FACTORS)
    return scaling
