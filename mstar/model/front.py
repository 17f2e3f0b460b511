"""The part of a model that stubs and clients hold: prompts to token ids, and what limits a request.  Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mstar.model.checkpoint import Checkpoint, open_checkpoint
from mstar.text.chat_template import ChatTemplate
from mstar.text.gguf_tokenizer import tokenizer_from_gguf
from mstar.text.tokenizer import Tokenizer
from mstar.utils.errors import Unsupported


@dataclass(frozen=True)
class ModelFront:
    """A text model without its weights.  Its methods may be called from several threads.

    ``vocab_size`` counts the embedding's rows: a prompt's ids must be below it.  ``context_length`` is the model's
    own limit of prompt plus output, in tokens.  ``generation`` holds the defaults of parameters that the
    checkpoint names.  ``chat`` is None for a model without a chat template.
    """

    name: str
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    def encode(self, text: str) -> np.ndarray:
        """Token ids int32 of a raw prompt.

        A tokenizer that asks for a begin token adds it, also before text that spells the begin token itself, as the
        reference tokenizers do.
        """
        return np.asarray(self.tokenizer.encode(text), dtype=np.int32)

    def encode_chat(self, messages: list[dict[str, Any]]) -> np.ndarray:
        """Token ids int32 of a chat: the template's own text, with nothing added around it.

        Raises:
            Unsupported: the model has no chat template.
            InvalidArgument: the template refuses the messages.
        """
        if self.chat is None:
            raise Unsupported("messages", "a model with a chat template", self.name)
        return np.asarray(self.tokenizer.encode(self.chat.render(messages), add_special_tokens=False), dtype=np.int32)


def open_front(name: str) -> ModelFront:
    """Opens the front part of a model by the names :func:`mstar.model.checkpoint.open_checkpoint` takes.

    Raises:
        LoadError: as there, and for a missing or malformed tokenizer or chat template.
    """
    return front_of(open_checkpoint(name))


def front_of(checkpoint: Checkpoint) -> ModelFront:
    """The front part of an opened checkpoint.  LoadError for a missing or malformed tokenizer or template."""
    tokenizer = _tokenizer_of(checkpoint.tokenizer_source)
    template = checkpoint.chat_template
    return ModelFront(
        name=checkpoint.name,
        vocab_size=checkpoint.config.vocab_size,
        context_length=checkpoint.config.context_length,
        eos_ids=checkpoint.eos_ids,
        tokenizer=tokenizer,
        chat=None if template is None else ChatTemplate(template, checkpoint.bos_token, checkpoint.eos_token),
        generation=dict(checkpoint.generation),
    )


def _tokenizer_of(source: Path | Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_file(source) if isinstance(source, Path) else tokenizer_from_gguf(source)
