"""Where a checkpoint's tensors lie, under Hugging Face names and in Hugging Face row order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class TensorEntry:
    """``stored_as`` is the tensor's name in ``file``.

    ``dtype`` None stands for quantised weights, whose GGML type is ``block_kind``.
    """

    shape: tuple[int, ...]
    file: Path
    stored_as: str
    dtype: torch.dtype | None
    block_kind: str | None = None


class TensorSource(ABC):
    """All tensors of one checkpoint.  ``entries`` maps Hugging Face names to where they are stored."""

    entries: dict[str, TensorEntry]
    ignored: frozenset[str] = frozenset()

    @abstractmethod
    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copies a tensor into ``out`` (of its shape, any dtype and device), row by row in Hugging Face order."""

    def read_blocks(self, name: str) -> torch.Tensor:
        """A tensor whose entry has a ``block_kind``, as stored: uint8 [rows, bytes], in Hugging Face row order."""
        raise NotImplementedError(f"{name} is not stored in blocks")

    @abstractmethod
    def place_of(self, name: str) -> str:
        """The file a tensor of this Hugging Face name should be in, and its name there, for messages."""

    def close(self) -> None:
        """Lets go of the files."""
