"""What bytes each token id stands for: the table every decoding of ids to text reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class PieceTable(dict[int, bytes]):
    """Bytes per token id; an id without text (unknown, unused) reads as no bytes, so a lookup never raises."""

    def __missing__(self, token_id: int) -> bytes:
        return b""

    def without(self, ids: Iterable[int]) -> PieceTable:
        """The same table in which ``ids`` have no text."""
        twin = PieceTable(self)
        for token_id in ids:
            twin.pop(token_id, None)
        return twin


class PieceDecoder:
    """A decoder that turns a token into the same bytes wherever it stands: byte-level, or with byte fallback.

    Attributes:
        strip_leading_space: the tokenizer drops one space at the very start of a decoded text.
    """

    def __init__(
        self,
        *,
        byte_level: bool = False,
        byte_fallback: bool = False,
        replacements: tuple[tuple[str, str], ...] = (),
        strip_leading_space: bool = False,
    ) -> None:
        self._byte_level = byte_level
        self._byte_fallback = byte_fallback
        self._replacements = replacements
        self.strip_leading_space = strip_leading_space

    @classmethod
    def of(cls, decoder: Mapping[str, Any] | None) -> PieceDecoder | None:
        """The decoder that the ``decoder`` part of a tokenizer.json describes; None if it is of another kind."""
        parts = [] if decoder is None else list(flat_steps(decoder))
        match [part["type"] for part in parts]:
            case ["ByteLevel"] | ["ByteLevel", "Fuse"]:
                return cls(byte_level=True)
            case ["Metaspace"] if parts[0].get("prepend_scheme") == "never":
                return cls(replacements=((parts[0]["replacement"], " "),))
        replacements = []
        while parts:
            match parts[0]:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    replacements.append((old, new))
                    del parts[0]
                case _:
                    break
        match parts:
            case [{"type": "ByteFallback"}, {"type": "Fuse"}]:
                strip = 0
            case [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "stop": 0} as part]:
                strip = part["start"]
            case _:
                return None
        if strip not in (0, 1):
            return None
        return cls(byte_fallback=True, replacements=tuple(replacements), strip_leading_space=strip == 1)

    def table(self, tokens: Mapping[int, str], added: Iterable[int]) -> PieceTable:
        """Bytes of every token.

        Args:
            tokens: token by id, as the vocabulary spells it.
            added: ids of the added tokens.  In a byte-level vocabulary they stand for themselves: they are plain text,
                whose accented letters are not the alphabet's (the library mangles them).
        """
        pieces = PieceTable({token_id: self._piece(token) for token_id, token in tokens.items()})
        if self._byte_level:
            pieces.update({token_id: tokens[token_id].encode() for token_id in added})
        return pieces

    def _piece(self, token: str) -> bytes:
        if self._byte_level:
            return byte_level_piece(token)
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = byte_token(token) if self._byte_fallback else None
        return token.encode() if byte is None else byte


def flat_steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The decoders of a sequence one by one, nested ones too; another decoder is a sequence of itself."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for part in decoder["decoders"]:
        yield from flat_steps(part)


def byte_token(token: str) -> bytes | None:
    """The byte that ``<0xNN>`` stands for; None for other tokens."""
    found = _BYTE_TOKEN.match(token)
    return bytes([int(found[1], 16)]) if found else None


def _byte_level_alphabet() -> dict[int, str]:
    """Visible character -> the byte it stands for (as latin-1), GPT-2's byte-level alphabet turned around.

    Printable latin-1 stands for itself; the other 68 bytes take U+0100 onwards in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {byte: chr(byte) for byte in visible}
    alphabet.update({0x100 + index: chr(byte) for index, byte in enumerate(hidden)})
    # The hidden bytes' own code points are no letters of the alphabet: sent out of latin-1, so that encoding fails.
    alphabet.update(dict.fromkeys(hidden, "\uffff"))
    return alphabet


_ALPHABET = _byte_level_alphabet()


def byte_level_piece(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # not spelt in the alphabet: the token is plain text
        return token.encode()
