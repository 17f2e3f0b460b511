"""A model's own defaults of request parameters, as its author recommends them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

ABOVE_ZERO = 5e-324  # the smallest number there is
FLOAT32_MAX = 3.4028234663852886e38


class Rule(NamedTuple):
    """The parameter behind a file's key, and the values of it that make sense."""

    name: str
    low: float
    high: float
    is_whole: bool = False


HF_KEYS: Mapping[str, Rule] = {
    "temperature": Rule("temperature", 0, FLOAT32_MAX),
    "top_k": Rule("top_k", -1, 2**63 - 1, is_whole=True),
    "top_p": Rule("top_p", ABOVE_ZERO, 1),
    "min_p": Rule("min_p", 0, 1),
    "repetition_penalty": Rule("repetition_penalty", ABOVE_ZERO, FLOAT32_MAX),
    "max_new_tokens": Rule("max_tokens", 0, 2**63 - 1, is_whole=True),
    "min_new_tokens": Rule("min_tokens", 0, 2**63 - 1, is_whole=True),
}
# What changes a text and is not honoured, with the values that change nothing.
HF_LEFT_OUT: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "stop_strings": ([], ""),
}
# penalty_repeat is left out: over its window of last tokens it is another penalty than repetition_penalty.
GGUF_KEYS: Mapping[str, Rule] = {
    "general.sampling.temp": HF_KEYS["temperature"],
    "general.sampling.top_k": HF_KEYS["top_k"],
    "general.sampling.top_p": HF_KEYS["top_p"],
    "general.sampling.min_p": HF_KEYS["min_p"],
}


def generation_of_hf(raw: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Defaults by parameter name from a parsed ``generation_config.json``; what is absent or null has none.

    ``do_sample`` false, written out, makes greedy the default whatever the temperature, as in transformers.  A value
    that makes no sense is left out, with a warning that names ``file`` and the key: a model does not fail to load for
    it.  What this engine cannot honour (:data:`HF_LEFT_OUT`) is warned of too.
    """
    defaults = _sensible(raw, HF_KEYS, file)
    do_sample = raw.get("do_sample")
    if do_sample is False:
        defaults["temperature"] = 0.0
    elif do_sample not in (None, True):
        _warn(file, "do_sample", do_sample)
    for key, neutral in HF_LEFT_OUT.items():
        value = raw.get(key)
        if value is not None and value not in neutral:
            logger.warning("%s: %s: %.60r is not honoured", file, key, value)
    return defaults


def generation_of_gguf(meta: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The same from a GGUF's metadata, ``general.sampling.*``."""
    return _sensible(meta, GGUF_KEYS, file)


def _sensible(raw: Mapping[str, Any], rules: Mapping[str, Rule], file: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for key, rule in rules.items():
        value = raw.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not rule.low <= value <= rule.high or (rule.is_whole and value != int(value)):
            _warn(file, key, value)
            continue
        defaults[rule.name] = int(value) if rule.is_whole else float(value)
    return defaults


def _warn(file: str, key: str, value: Any) -> None:
    logger.warning("%s: %s: %.60r makes no sense and is ignored", file, key, value)
