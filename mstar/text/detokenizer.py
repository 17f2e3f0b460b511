"""Incremental detokenisation: token ids in, whole characters out."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

import numpy as np

from mstar.text.pieces import PieceTable

MAX_ORPHANS = 3  # continuation bytes that a character begun before the text can still claim


class Detokenizer:
    """Text of one sequence of generated tokens, made piece by piece.

    The concatenation of everything returned equals ``tokenizer.decode`` of all ids, however they are split into
    pushes.  Bytes that are not UTF-8 become U+FFFD as the Unicode standard recommends (one per maximal ill-formed
    part), except at the two ends: continuation bytes at the very start (the prompt ended inside a character) are
    dropped, and an unfinished character at the very end becomes one U+FFFD.  Unknown ids have no text; nothing raises.

    Args:
        pieces: bytes per token id (``Tokenizer.detokenizer`` picks the right table).
        strip_leading_space: drop one space at the very start of the text.
    """

    __slots__ = ("_orphans_left", "_pending", "_pieces", "_started", "_strip_space")

    def __init__(self, pieces: PieceTable, strip_leading_space: bool = False) -> None:
        self._pieces = pieces
        self._strip_space = strip_leading_space
        self._started = False
        self._orphans_left = MAX_ORPHANS
        self._pending = b""

    def push(self, ids: Sequence[int] | np.ndarray) -> str:
        """The characters that ``ids`` complete."""
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        data = self._pending + b"".join(map(self._pieces.__getitem__, ids))
        if not self._started:
            data = self._begin(data)
        text, used = utf_8_decode(data, "replace")
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """U+FFFD if the text ended inside a character, else nothing."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text

    def fork(self) -> Detokenizer:
        """A second detokenizer that goes on from the same point."""
        twin = object.__new__(Detokenizer)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def _begin(self, data: bytes) -> bytes:
        """Drop what does not belong to the text from its first bytes."""
        start = 0
        while start < len(data) and self._orphans_left and 0x80 <= data[start] < 0xC0:
            start += 1
            self._orphans_left -= 1
        if start == len(data):
            return b""
        self._started = True
        if self._strip_space and data[start] == 0x20:
            start += 1
        return data[start:]
