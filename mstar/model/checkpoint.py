"""A model on disk, opened: everything about it but its weights.  Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mstar.model.config import ModelConfig
from mstar.model.families import Family, family_of_hf
from mstar.model.generation import generation_of_gguf, generation_of_hf
from mstar.model.gguf_config import config_from_gguf
from mstar.model.gguf_file import GGUFFile
from mstar.model.hf_config import config_from_hf
from mstar.model.hf_folder import (
    chat_template_of,
    eos_of_generation,
    id_of_token,
    read_json,
    token_text,
)
from mstar.model.locate import locate
from mstar.utils.errors import LoadError


@dataclass(frozen=True)
class Checkpoint:
    """One opened checkpoint.

    ``tokenizer_source`` is the path of ``tokenizer.json`` or a GGUF's metadata.  ``eos_ids`` unites the ids of the
    configuration, the generation configuration and the tokenizer.  ``generation`` holds the defaults that the
    model's author recommends, by parameter name.  ``gguf`` is None for a Hugging Face folder.
    """

    name: str
    path: Path
    family: Family
    config: ModelConfig
    tokenizer_source: Path | Mapping[str, Any]
    eos_ids: frozenset[int]
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    gguf: GGUFFile | None = None


def open_checkpoint(name: str) -> Checkpoint:
    """Opens a local folder, a ``.gguf`` file, a Hugging Face id, or an alias (see :func:`mstar.model.locate.locate`).

    Raises:
        LoadError: it cannot be found, or one of its files is missing, malformed, cut short, or of an unknown
            architecture or quantisation; names the file and the key or tensor.
    """
    path = locate(name)
    return _open_gguf(name, path) if path.is_file() else _open_folder(name, path)


def _open_gguf(name: str, path: Path) -> Checkpoint:
    file = GGUFFile.open(path)
    config, family = config_from_gguf(file)
    meta = file.metadata
    template = meta.get("tokenizer.chat_template")
    return Checkpoint(
        name=name,
        path=path,
        family=family,
        config=config,
        tokenizer_source=meta,
        eos_ids=_in_vocabulary(config.eos_ids, config),
        chat_template=template if isinstance(template, str) else None,
        bos_token=_token_of(meta, "tokenizer.ggml.bos_token_id"),
        eos_token=_token_of(meta, "tokenizer.ggml.eos_token_id"),
        generation=generation_of_gguf(meta, str(path)),
        gguf=file,
    )


def _open_folder(name: str, folder: Path) -> Checkpoint:
    config_file = folder / "config.json"
    raw = read_json(config_file)
    if raw is None:
        raise LoadError(f"{config_file}: is missing; a model folder has config.json and *.safetensors")
    config = config_from_hf(raw, str(config_file))
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) or {}
    tokenizer_config = read_json(folder / "tokenizer_config.json") or {}
    eos_token = token_text(tokenizer_config, "eos_token")
    tokenizer_eos = id_of_token(folder, tokenizer_config, eos_token)
    eos = config.eos_ids | eos_of_generation(generation, str(generation_file))
    eos |= frozenset() if tokenizer_eos is None else {tokenizer_eos}
    return Checkpoint(
        name=name,
        path=folder,
        family=family_of_hf(raw.get("architectures"), str(config_file)),
        config=config,
        tokenizer_source=folder / "tokenizer.json",
        eos_ids=_in_vocabulary(eos, config),
        chat_template=chat_template_of(folder, tokenizer_config),
        bos_token=token_text(tokenizer_config, "bos_token"),
        eos_token=eos_token,
        generation=generation_of_hf(generation, str(generation_file)),
    )


def _in_vocabulary(ids: frozenset[int], config: ModelConfig) -> frozenset[int]:
    return frozenset(i for i in ids if i < config.vocab_size)


def _token_of(meta: Mapping[str, Any], key: str) -> str | None:
    index, tokens = meta.get(key), meta.get("tokenizer.ggml.tokens")
    if isinstance(index, int) and isinstance(tokens, list) and index < len(tokens):
        return tokens[index]
    return None
