"""The JSON files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstar.model.config import read_ids
from mstar.utils.errors import LoadError


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if there is no such file.  LoadError naming the file if it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: must hold a JSON object")
    return value


def chat_template_of(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The chat template: ``chat_template.jinja`` before ``tokenizer_config.json``, whose list form has a default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def token_text(tokenizer_config: Mapping[str, Any], key: str) -> str | None:
    """The text of ``bos_token`` or ``eos_token``, which is a string or an object with ``content``."""
    token = tokenizer_config.get(key)
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def id_of_token(folder: Path, tokenizer_config: Mapping[str, Any], text: str | None) -> int | None:
    """The id of an added token, without building the tokenizer: None if no file lists it."""
    if text is None:
        return None
    for number, entry in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == text:
            return int(number)
    tokenizer = read_json(folder / "tokenizer.json") or {}
    for entry in tokenizer.get("added_tokens") or ():
        if entry.get("content") == text:
            return int(entry["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(text) if isinstance(vocab, dict) else None


def eos_of_generation(raw: Mapping[str, Any], file: str) -> frozenset[int]:
    """The end tokens of ``generation_config.json``; none where it names none."""
    return read_ids(raw, "eos_token_id", file)
