"""config.json of a Hugging Face folder, read into a :class:`ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mstar.model.config import ModelConfig, read_flag, read_float, read_ids, read_int
from mstar.model.families import family_of_hf
from mstar.model.rope import context_length, parse_rope_scaling
from mstar.utils.errors import LoadError


def config_from_hf(raw: Mapping[str, Any], file: str) -> ModelConfig:
    """Reads the parsed ``config.json``; ``file`` is its path, for messages.

    Keys that are absent take the defaults of transformers.

    Raises:
        LoadError: unknown architecture, quantised weights, another activation than silu, windowed attention, or a
            missing or malformed number.
    """
    family = family_of_hf(raw.get("architectures"), file)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise LoadError(f"{file}: quantization_config: quantisation {method!r} is not supported; use plain weights")
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise LoadError(f"{file}: hidden_act must be 'silu', got {act!r}")
    num_layers = read_int(raw, "num_hidden_layers", file)
    _refuse_windows(raw, num_layers, file)
    hidden = read_int(raw, "hidden_size", file)
    heads = read_int(raw, "num_attention_heads", file)
    head_dim = read_int(raw, "head_dim", file, family.default_head_dim or max(hidden // heads, 1))
    rope = _rope_settings(raw, file)
    positions = read_int(raw, "max_position_embeddings", file, family.default_max_positions)
    scaling = parse_rope_scaling(rope, positions, file)
    attention_bias = not family.qkv_bias and read_flag(raw, "attention_bias", file)
    bos = read_ids(raw, "bos_token_id", file)
    return ModelConfig(
        family=family.name,
        vocab_size=read_int(raw, "vocab_size", file),
        hidden_size=hidden,
        intermediate_size=read_int(raw, "intermediate_size", file),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=read_int(raw, "num_key_value_heads", file, heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * read_float(rope, "partial_rotary_factor", file, 1.0)),
        rms_norm_eps=read_float(raw, "rms_norm_eps", file, 1e-6),
        rope_theta=read_float(rope, "rope_theta", file, 10000.0),
        rope_scaling=scaling,
        max_position_embeddings=positions,
        context_length=context_length(positions, scaling),
        tie_word_embeddings=read_flag(raw, "tie_word_embeddings", file),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.name == "llama" and read_flag(raw, "mlp_bias", file),
        qk_norm=family.qk_norm,
        eos_ids=read_ids(raw, "eos_token_id", file),
        bos_id=min(bos, default=None),
    ).check(file)


def _rope_settings(raw: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Rotary settings of either layout: ``rope_parameters`` (new), or ``rope_theta`` beside ``rope_scaling``."""
    settings: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        block = raw.get(key)
        if block is not None and not isinstance(block, Mapping):
            raise LoadError(f"{file}: {key} must be an object, got {block!r}")
        settings |= block or {}
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise LoadError(f"{file}: rope_parameters per layer type are not supported")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key not in settings and key in raw:
            settings[key] = raw[key]
    return settings


def _refuse_windows(raw: Mapping[str, Any], num_layers: int, file: str) -> None:
    if raw.get("use_sliding_window") and raw.get("max_window_layers", num_layers) < num_layers:
        raise LoadError(f"{file}: use_sliding_window: sliding-window attention is not supported")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise LoadError(f"{file}: layer_types: only full_attention layers are supported")
