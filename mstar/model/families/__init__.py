"""Text families by the names their checkpoints give."""

from __future__ import annotations

from mstar.model.families import llama, mistral, qwen2, qwen3
from mstar.model.families.base import Family
from mstar.utils.errors import LoadError

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)
BY_HF_NAME = {name: family for family in FAMILIES for name in family.hf_architectures}
BY_GGUF_NAME = {name: family for family in FAMILIES for name in family.gguf_architectures}

__all__ = ["FAMILIES", "Family", "family_of_gguf", "family_of_hf"]


def family_of_hf(architectures: object, file: str) -> Family:
    """The family of config.json's ``architectures``.  LoadError naming the file for an unknown one."""
    for name in architectures if isinstance(architectures, list) else [architectures]:
        if isinstance(name, str) and name in BY_HF_NAME:
            return BY_HF_NAME[name]
    raise LoadError(f"{file}: architecture {architectures!r} is unknown; known: {', '.join(BY_HF_NAME)}")


def family_of_gguf(architecture: object, file: str) -> Family:
    """The family of ``general.architecture``.  LoadError naming the file for an unknown one."""
    if isinstance(architecture, str) and architecture in BY_GGUF_NAME:
        return BY_GGUF_NAME[architecture]
    raise LoadError(f"{file}: architecture {architecture!r} is unknown; known: {', '.join(BY_GGUF_NAME)}")
