"""Decoders of the ``tokenizers`` library as steps over a stream of tokens.

The library decodes a finished list of tokens.  A step does the same to tokens as they come and hands on at once what
no later token can change: it remembers a token or a few characters, never the text.  Behind ``Fuse`` (and byte-level)
the tokens are portions of one text whose borders mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, NoReturn, Self

from tokenizers import Regex, decoders

from mstar.text.matching import beginning_length, common_length
from mstar.text.pieces import PieceTable, byte_level_piece, byte_token, flat_steps
from mstar.text.utf8 import Utf8Reader
from mstar.utils.errors import LoadError


class Step:
    """One decoder.  ``piece`` is what it makes of a token somewhere inside a text, bytes that are no character as lone
    surrogates (``surrogateescape``)."""

    def push(self, tokens: list[str]) -> list[str]:
        """What the next tokens become."""
        return [self.piece(token) for token in tokens]

    def flush(self) -> list[str]:
        """What was still held back, at the end."""
        return []

    def piece(self, token: str) -> str:
        raise NotImplementedError

    def fork(self) -> Self:
        return copy(self)


class EachToken(Step):
    """Every token by itself."""

    def __init__(self, decode: Callable[[str], str]) -> None:
        self._decode = decode

    def piece(self, token: str) -> str:
        return self._decode(token)


class FirstAndRest(Step):
    """The first token in one way, all others in another (WordPiece, Metaspace)."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self._first = first
        self._rest = rest
        self._started = False

    def push(self, tokens: list[str]) -> list[str]:
        if self._started or not tokens:
            return super().push(tokens)
        self._started = True
        return [self._first(tokens[0]), *map(self._rest, tokens[1:])]

    def piece(self, token: str) -> str:
        return self._rest(token)


class WordEnds(Step):
    """BPEDecoder: a word's end is a space, except on the last token, where it is nothing."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._owed = ("", "")  # what the last token still adds: if it stays the last, and if another follows

    def push(self, tokens: list[str]) -> list[str]:
        parts = []
        for token in tokens:
            last, inner = token.replace(self._suffix, ""), self.piece(token)
            sure = common_length(last, inner)
            parts += [self._owed[1], inner[:sure]]
            self._owed = last[sure:], inner[sure:]
        return parts

    def flush(self) -> list[str]:
        return [self._owed[0]]

    def piece(self, token: str) -> str:
        return token.replace(self._suffix, " ")


class CollapseRepeats(Step):
    """CTC: a token directly after itself adds nothing, nor does the padding between tokens."""

    def __init__(self, decoder: decoders.CTC) -> None:
        self._decoder = decoder
        self._last: str | None = None

    def push(self, tokens: list[str]) -> list[str]:
        out = []
        for token in tokens:
            if token != self._last and (text := self.piece(token)):
                out.append(text)
            self._last = token
        return out

    def piece(self, token: str) -> str:
        return self._decoder.decode([token])


class Bytes(Step):
    """ByteLevel: letters that stand for bytes."""

    def __init__(self) -> None:
        self._reader = Utf8Reader()

    def push(self, tokens: list[str]) -> list[str]:
        return [self._reader.read(b"".join(map(byte_level_piece, tokens)))]

    def flush(self) -> list[str]:
        return [self._reader.flush()]

    def piece(self, token: str) -> str:
        return byte_level_piece(token).decode(errors="surrogateescape")

    def fork(self) -> Self:
        twin = copy(self)
        twin._reader = self._reader.fork()
        return twin


class ByteTokens(Bytes):
    """ByteFallback: tokens ``<0xNN>`` among others."""

    def push(self, tokens: list[str]) -> list[str]:
        out = []
        for token in tokens:
            byte = byte_token(token)
            text = self._reader.flush() if byte is None else self._reader.read(byte)
            out += [text] if text else []
            out += [token] if byte is None else []
        return out

    def piece(self, token: str) -> str:
        byte = byte_token(token)
        return token if byte is None else byte.decode(errors="surrogateescape")


class ReplaceInText(Step):
    """Replace behind Fuse: holds back what may be the beginning of ``old``."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def push(self, tokens: list[str]) -> list[str]:
        *done, rest = (self._held + "".join(tokens)).split(self._old)
        keep = beginning_length(rest, self._old)
        self._held = rest[len(rest) - keep :]
        return [self._new.join([*done, rest[: len(rest) - keep]])]

    def flush(self) -> list[str]:
        return [self._held]

    def piece(self, token: str) -> str:
        return token.replace(self._old, self._new)


class StripText(Step):
    """Strip behind Fuse: up to ``start`` characters ``content`` at the beginning, up to ``stop`` at the end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""

    def push(self, tokens: list[str]) -> list[str]:
        text = self._held + "".join(tokens)
        while self._start and text:
            if text[0] != self._content:
                self._start = 0
                break
            self._start -= 1
            text = text[1:]
        keep = min(self._stop, len(text) - len(text.rstrip(self._content)))
        self._held = text[len(text) - keep :]
        return [text[: len(text) - keep]]

    def piece(self, token: str) -> str:
        return token


def steps_of(decoder: Mapping[str, Any] | None) -> list[Step]:
    """The steps of a decoder, from the ``decoder`` part of a tokenizer.json (None: the library joins with spaces).

    Raises:
        LoadError: a decoder is not known, or stands where it cannot be followed as tokens come.
    """
    if decoder is None:
        return [FirstAndRest(str, lambda token: " " + token)]
    steps: list[Step] = []
    fused = False
    for part in flat_steps(decoder):
        if steps and isinstance(steps[-1], WordEnds) and not fused and part["type"] != "Fuse":
            _refuse(part)  # a token's two parts would be taken for two tokens
        if part["type"] == "Fuse":
            fused = True
        elif fused:
            steps.append(_text_step(part))
        else:
            steps.append(_token_step(part))
            fused = part["type"] == "ByteLevel"
    return steps


def clean_up_steps() -> list[Step]:
    """``clean_up_tokenization_spaces`` of transformers: no space before punctuation and English endings."""
    endings = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
    return [ReplaceInText(ending, ending.strip()) for ending in endings]


def piece_table(steps: Sequence[Step], tokens: Mapping[int, str]) -> PieceTable:
    """Bytes that each token adds somewhere inside a text.

    Args:
        tokens: token by id, as the vocabulary spells it.
    """
    pieces = PieceTable()
    for token_id, token in tokens.items():
        for step in steps:
            with suppress(UnicodeEncodeError):  # part of a character: the library's steps take whole ones only
                token = step.piece(token)
        pieces[token_id] = token.encode(errors="surrogateescape")
    return pieces


def _token_step(part: Mapping[str, Any]) -> Step:
    match part:
        case {"type": "ByteLevel"}:
            return Bytes()
        case {"type": "ByteFallback"}:
            return ByteTokens()
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return _by_position(decoders.WordPiece(prefix, cleanup))
        case {"type": "Metaspace", "replacement": mark}:
            return _by_position(decoders.Metaspace(mark, part.get("prepend_scheme", "always")))
        case {"type": "BPEDecoder", "suffix": str(suffix)}:
            return WordEnds(suffix)
        case {"type": "CTC", "pad_token": pad, "word_delimiter_token": delimiter, "cleanup": cleanup}:
            return CollapseRepeats(decoders.CTC(pad, delimiter, cleanup))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return EachToken(lambda token: token.replace(old, new))
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(new)}:
            replace = decoders.Replace(Regex(pattern), new)
            return EachToken(lambda token: replace.decode([token]))
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": int(stop)}:
            return EachToken(lambda token: _strip(token, content, start, stop))
    _refuse(part)


def _text_step(part: Mapping[str, Any]) -> Step:
    match part:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return ReplaceInText(old, new)
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": int(stop)}:
            return StripText(content, start, stop)
    _refuse(part)


def _by_position(decoder: decoders.Decoder) -> Step:
    return FirstAndRest(lambda token: decoder.decode([token]), lambda token: decoder.decode(["", token]))


def _strip(token: str, content: str, start: int, stop: int) -> str:
    step = StripText(content, start, stop)
    return "".join(step.push([token]))


def _refuse(part: Mapping[str, Any]) -> NoReturn:
    raise LoadError(f"tokenizer: no way is known to decode token by token with {dict(part)!r} where it stands")
