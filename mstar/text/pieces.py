"""What bytes each token id stands for: the table every decoding of ids to text reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mstar.utils.errors import LoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_KNOWN_DECODERS = "ByteLevel, Metaspace, or Replace, ByteFallback, Fuse and Strip in sequence"


class PieceTable(dict[int, bytes]):
    """Bytes per token id; an id without text (unknown, unused) reads as no bytes, so a lookup never raises."""

    def __missing__(self, token_id: int) -> bytes:
        return b""


class PieceDecoder:
    """How one tokenizer turns a token into bytes, read from the ``decoder`` part of a tokenizer.json.

    Attributes:
        strip_leading_space: the tokenizer drops one space at the very start of a decoded text.

    Raises:
        LoadError: the decoder has a step that this table cannot express token by token.
    """

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.strip_leading_space = False
        fused = False
        for step in _steps(decoder):
            match step:
                case {"type": "ByteLevel"}:
                    self._byte_level = True
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                    self._replacements.append((old, new))
                case {"type": "Metaspace", "replacement": str(mark)}:
                    self._replacements.append((mark, " "))
                    self.strip_leading_space = step.get("prepend_scheme", "always") != "never"
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused and start in (0, 1):
                    self.strip_leading_space = start == 1
                case _:
                    raise LoadError(f"tokenizer: a decoder made of {_KNOWN_DECODERS} is supported, got {step!r}")

    def table(self, tokens: Iterable[tuple[int, str]], literal: Mapping[int, str]) -> PieceTable:
        """Bytes of every token.

        Args:
            tokens: (id, token as the vocabulary spells it).
            literal: added tokens by id; their text stands for itself, with no decoding rule applied.
        """
        pieces = PieceTable({token_id: self._piece(token) for token_id, token in tokens if token_id not in literal})
        for token_id, text in literal.items():
            pieces[token_id] = text.encode()
        return pieces

    def _piece(self, token: str) -> bytes:
        if self._byte_level:
            return _byte_level_piece(token)
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise LoadError(f"tokenizer: a decoder made of {_KNOWN_DECODERS} is needed, got none")
    if decoder.get("type") == "Sequence":
        return list(decoder["decoders"])
    return [decoder]


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


def _byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # not spelt in the alphabet: the token is plain text
        return token.encode()
