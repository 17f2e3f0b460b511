"""Incremental detokenisation: token ids in, whole characters out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

import numpy as np

from mstar.text.decoder_steps import Step
from mstar.text.pieces import PieceTable
from mstar.text.utf8 import Utf8Reader


class Detokenizer(Protocol):
    """Text of one sequence of generated tokens, made piece by piece.

    The concatenation of everything returned equals ``tokenizer.decode`` of all ids, however they are split into
    pushes.  An unfinished character at the very end becomes one U+FFFD; continuation bytes at the very start (the
    prompt ended inside a character) are dropped.  Unknown ids have no text; nothing raises.
    """

    def push(self, ids: Sequence[int] | np.ndarray) -> str:
        """The characters that ``ids`` complete."""

    def flush(self) -> str:
        """The rest, once the last id was pushed: U+FFFD if the text ended inside a character."""

    def fork(self) -> Self:
        """A second detokenizer that goes on from the same point."""


class PieceDetokenizer:
    """``Detokenizer`` for tokenizers whose every token stands for the same bytes wherever it occurs.

    Args:
        pieces: bytes per token id.
        strip_leading_space: drop one space at the very start of the text.
    """

    __slots__ = ("_pieces", "_reader", "_strip_space")

    def __init__(self, pieces: PieceTable, strip_leading_space: bool = False) -> None:
        self._pieces = pieces
        self._reader = Utf8Reader()
        self._strip_space = strip_leading_space

    def push(self, ids: Sequence[int] | np.ndarray) -> str:
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        text = self._reader.read(b"".join(map(self._pieces.__getitem__, ids)))
        if self._strip_space and text:
            self._strip_space = False
            # After orphan bytes the text goes on inside a word of the prompt: the space is its own.
            if text[0] == " " and not self._reader.num_orphans:
                return text[1:]
        return text

    def flush(self) -> str:
        return self._reader.flush()

    def fork(self) -> PieceDetokenizer:
        twin = object.__new__(PieceDetokenizer)
        twin._pieces = self._pieces
        twin._reader = self._reader.fork()
        twin._strip_space = self._strip_space
        return twin


class StepDetokenizer:
    """``Detokenizer`` for all other tokenizers: tokens pass through the decoder's steps.

    Args:
        tokens: token per id, as the vocabulary spells it; an id that is not there adds nothing, not even a place.
        steps: of the decoder, fresh; the detokenizer makes copies of them its own.
    """

    __slots__ = ("_steps", "_tokens")

    def __init__(self, tokens: Mapping[int, str], steps: Sequence[Step]) -> None:
        self._tokens = tokens
        self._steps = [step.fork() for step in steps]

    def push(self, ids: Sequence[int] | np.ndarray) -> str:
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        tokens = [self._tokens[token_id] for token_id in ids if token_id in self._tokens]
        for step in self._steps:
            tokens = step.push(tokens)
        return "".join(tokens)

    def flush(self) -> str:
        tokens: list[str] = []
        for step in self._steps:
            tokens = step.push(tokens) + step.flush()
        return "".join(tokens)

    def fork(self) -> StepDetokenizer:
        return StepDetokenizer(self._tokens, self._steps)
