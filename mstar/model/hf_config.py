"""config.json of a Hugging Face folder, read into a :class:`ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mstar.model.config import ModelConfig, read_flag, read_float, read_ids, read_int
from mstar.model.families import Family, family_of_hf
from mstar.model.rope import ORIGINAL, context_length, parse_rope_scaling
from mstar.utils.errors import LoadError

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_MAX_WINDOW_LAYERS = 28  # of Qwen2 and Qwen3: the layers below it see everything


def config_from_hf(raw: Mapping[str, Any], file: str) -> ModelConfig:
    """Reads the parsed ``config.json``; ``file`` is its path, for messages.

    Keys that are absent take the defaults of transformers.

    Raises:
        LoadError: unknown architecture, quantised weights, another activation than silu, windowed attention in some
            layers only, or a missing or malformed number.
    """
    family = family_of_hf(raw.get("architectures"), file)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise LoadError(f"{file}: quantization_config: quantisation {method!r} is not supported; use plain weights")
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise LoadError(f"{file}: hidden_act must be 'silu', got {act!r}")
    num_layers = read_int(raw, "num_hidden_layers", file)
    window = _sliding_window(raw, family, num_layers, file)
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
        sliding_window=window,
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
    if ORIGINAL in raw:  # wins over the block's, as in transformers
        settings[ORIGINAL] = raw[ORIGINAL]
    return settings


def _sliding_window(raw: Mapping[str, Any], family: Family, num_layers: int, file: str) -> int | None:
    """The window of all layers in tokens, or None where all attend to everything."""
    key, kinds = _layer_kinds(raw, family, num_layers, file)
    if kinds == {FULL}:
        return None
    if kinds == {SLIDING}:
        return read_int(raw, "sliding_window", file, family.default_sliding_window)
    found = ", ".join(sorted(str(kind) for kind in kinds))
    raise LoadError(f"{file}: {key}: all layers must be {FULL}, or all {SLIDING}; got {found}")


def _layer_kinds(raw: Mapping[str, Any], family: Family, num_layers: int, file: str) -> tuple[str, set[Any]]:
    """The kinds of attention that the layers have, and the key that says so."""
    listed = raw.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers:
            raise LoadError(f"{file}: layer_types must list {num_layers} layers, got {listed!r}")
        return "layer_types", {kind if isinstance(kind, str) else repr(kind) for kind in listed}
    is_off = "sliding_window" in raw and raw["sliding_window"] is None
    if family.slides_by_default:
        return "sliding_window", {FULL if is_off else SLIDING}
    if is_off or not read_flag(raw, "use_sliding_window", file):
        return "use_sliding_window", {FULL}
    first = raw.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise LoadError(f"{file}: max_window_layers must be an integer >= 0, got {first!r}")
    return "use_sliding_window", {SLIDING if layer >= first else FULL for layer in range(num_layers)}
