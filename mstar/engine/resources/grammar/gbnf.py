"""Reads rules in EBNF: ``root ::= "a" digit* | ("b" | [^c-e]){2,3}``, comments from ``#`` to the end of a line.

What llama.cpp (GBNF) and xgrammar write alike.  Line breaks are blanks: a rule ends where the next ``name ::=``
begins.  Escapes: ``\\n`` and its like, ``\\xHH``, ``\\uHHHH``, ``\\UHHHHHHHH`` for a code point.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mstar.utils.errors import shorten

MAX_RULES = 1000
MAX_NESTING = 50  # brackets within brackets
MAX_REPEATS = 10_000  # {m,n}
LAST_CHAR = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)  # code points that no text has


@dataclass(frozen=True)
class Chars:
    """One character of these ranges of code points, both ends included; ascending, apart."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Seq:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """``item`` at least ``least`` times and at most ``most`` times; None is without end."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Ref:
    name: str


Node = Chars | Seq | Alt | Repeat | Ref

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\r\n]*)
    |(?P<define>::=)
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<literal>"(?:[^"\\\r\n]|\\.)*")
    |(?P<chars>\[(?:[^\]\\\r\n]|\\.)*\])
    |(?P<count>\{\s*\d{0,9}\s*(?:,\s*\d{0,9}\s*)?\})
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}
_ITSELF = frozenset("\\\"'[]^-?/.{}()|*+")


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def parse(text: str) -> dict[str, Node]:
    """The rules by name, in their order.

    Raises:
        ValueError: malformed, a rule that is defined twice or not at all, no rule ``root``; says where.
    """
    return _Parser(_tokens(text)).rules()


def _tokens(text: str) -> list[_Token]:
    found, at, line = [], 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"line {line}: {shorten(text[at : at + 20])} is no part of a rule")
        assert match.lastgroup is not None
        if match.lastgroup != "blank":
            found.append(_Token(match.lastgroup, match[0], line))
        line += match[0].count("\n")
        at = match.end()
    return found


class _Parser:
    """Recursive descent over the tokens; each method leaves ``_at`` behind what it read."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = [*tokens, _Token("end", "the end", tokens[-1].line if tokens else 1)]
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        lines: dict[str, int] = {}
        while self._tokens[self._at].kind != "end":
            name = self._take("name", "a rule's name")
            self._take("define", "::=")
            if name.text in rules:
                raise ValueError(f"line {name.line}: rule {name.text} is defined twice")
            if len(rules) == MAX_RULES:
                raise ValueError(f"line {name.line}: there are more than {MAX_RULES} rules")
            lines[name.text] = name.line
            rules[name.text] = self._alternatives()
        if "root" not in rules:
            raise ValueError("it has no rule root")
        for name_, node in rules.items():
            for ref in refs_of(node):
                if ref not in rules:
                    raise ValueError(f"line {lines[name_]}: rule {name_} uses {ref}, which is not defined")
        return rules

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._tokens[self._at].text == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _item(self) -> Node | None:
        token = self._tokens[self._at]
        if token.kind == "name" and self._tokens[self._at + 1].kind != "define":
            self._at += 1
            return Ref(token.text)
        if token.text == "(":
            return self._group()
        read = _READERS.get(token.text if token.kind == "mark" else token.kind)
        if read is None:
            return None
        self._at += 1
        try:
            return read(token.text)
        except ValueError as error:
            raise ValueError(f"line {token.line}: {error}") from error

    def _group(self) -> Node:
        self._at += 1
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ValueError(f"line {self._tokens[self._at].line}: groups are nested deeper than {MAX_NESTING}")
        inner = self._alternatives()
        self._depth -= 1
        if self._tokens[self._at].text != ")":
            self._expected(")")
        self._at += 1
        return inner

    def _repeated(self, item: Node) -> Node:
        token = self._tokens[self._at]
        bounds = _bounds(token)
        if bounds is None:
            return item
        self._at += 1
        least, most = bounds
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise ValueError(f"line {token.line}: {token.text} must count up, to {MAX_REPEATS} at most")
        if _bounds(self._tokens[self._at]) is not None:
            raise ValueError(f"line {token.line}: {token.text}{self._tokens[self._at].text} repeats a repetition")
        return Repeat(item, least, most)

    def _take(self, kind: str, what: str) -> _Token:
        token = self._tokens[self._at]
        if token.kind != kind:
            self._expected(what)
        self._at += 1
        return token

    def _expected(self, what: str) -> None:
        token = self._tokens[self._at]
        raise ValueError(f"line {token.line}: {what} must stand before {shorten(token.text)}")


def refs_of(node: Node) -> set[str]:
    """Names of the rules that a node uses itself."""
    if isinstance(node, Ref):
        return {node.name}
    return {name for child in children(node) for name in refs_of(child)}


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Seq):
        return node.items
    if isinstance(node, Alt):
        return node.options
    return (node.item,) if isinstance(node, Repeat) else ()


def _bounds(token: _Token) -> tuple[int, int | None] | None:
    if token.kind == "count":
        least, comma, most = token.text[1:-1].partition(",")
        if not least.strip() and not most.strip():
            raise ValueError(f"line {token.line}: {token.text} counts nothing")
        low = int(least) if least.strip() else 0
        return low, low if not comma else int(most) if most.strip() else None
    return {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(token.text) if token.kind == "mark" else None


def _unescaped(text: str) -> list[tuple[int, bool]]:
    """Code points, and whether each was written as an escape."""
    found = []
    for match in _ESCAPE.finditer(text):
        *codes, short, plain = match.groups()
        code = next((code for code in codes if code is not None), None)
        if plain is not None:
            found.append((ord(plain), False))
        elif code is not None:
            if int(code, 16) > LAST_CHAR or _SURROGATES[0] <= int(code, 16) <= _SURROGATES[1]:
                raise ValueError(f"{match[0]} is no character")
            found.append((int(code, 16), True))
        elif short in _ESCAPED or short in _ITSELF:
            found.append((ord(_ESCAPED.get(short, short)), True))
        else:
            raise ValueError(f"{shorten(match[0])} is no escape")
    return found


def _literal(text: str) -> Node:
    items = tuple(Chars(((code, code),)) for code, _ in _unescaped(text[1:-1]))
    return items[0] if len(items) == 1 else Seq(items)


def _class(text: str) -> Node:
    is_negated = text.startswith("[^")
    points = _unescaped(text[2 if is_negated else 1 : -1])
    ranges, i = [], 0
    while i < len(points):
        low = high = points[i][0]
        if i + 2 < len(points) and points[i + 1] == (ord("-"), False):
            high = points[i + 2][0]
            i += 2
        if high < low:
            raise ValueError(f"the range {shorten(chr(low) + '-' + chr(high))} in {shorten(text)} must count up")
        ranges.append((low, high))
        i += 1
    allowed = _without(_SURROGATES, _complement(ranges) if is_negated else _merged(ranges))
    if not allowed:
        raise ValueError(f"{shorten(text)} allows no character")
    return Chars(tuple(allowed))


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found, start = [], 0
    for low, high in _merged(ranges):
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    return [*found, (start, LAST_CHAR)] if start <= LAST_CHAR else found


def _without(hole: tuple[int, int], ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    parts = [part for low, high in ranges for part in ((low, min(high, hole[0] - 1)), (max(low, hole[1] + 1), high))]
    return [(low, high) for low, high in parts if low <= high]


_READERS: dict[str, Callable[[str], Node]] = {
    "literal": _literal,
    "chars": _class,
    ".": lambda text: _class("[^]"),
}
