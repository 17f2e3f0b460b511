"""What a request may give as a guide, and the grammar that llguidance makes of each kind.

json            any JSON object.
json_schema     a JSON schema, written as JSON (draft 2020-12, see :mod:`.schemas`).
regex           a regular expression in the syntax of Rust's ``regex``, matched by the whole text.
ebnf_grammar    rules ``root ::= ...`` as llama.cpp and xgrammar write them, see :mod:`.gbnf`.
choice          a JSON list of strings, one of which is the text.

JSON may have, wherever white space is allowed, one space, or a line break and up to 32 blanks to indent the next
line: a model that only emits white space comes to an end of it.  ``\\u`` escapes are left out, since they spell the
same string twice and so would let a property pass by its schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from mstar.engine.resources.grammar.config import GUIDE_KINDS, MAX_GUIDE_BYTES
from mstar.engine.resources.grammar.ebnf import lark_of
from mstar.engine.resources.grammar.schemas import settle_schema
from mstar.utils.errors import shorten

MAX_NESTING = 100  # brackets within brackets of a guide written as JSON

_JSON_OPTIONS = {
    "whitespace_pattern": r"( |\r?\n[ \t]{0,32})",
    "item_separator": ",",
    "key_separator": ":",
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
    "coerce_one_of": False,
    "lenient": False,
}
# Forced tokens would be the tokenizer's own spelling of a text that can go on in one way only: the model may spell it
# as it likes, and a token that other settings of the request bar leaves others.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_REGEX_SYNTAX = frozenset("\\.+*?()|[]{}^$")


def grammar_of(kind: str, text: str) -> str:
    """The grammar of a guide, for :class:`llguidance.LLMatcher`, which finds what else is wrong with it.

    Raises:
        ValueError: unknown ``kind``, or a text that is too large or malformed; begins with the request's field.
    """
    make = _MAKERS.get(kind)
    if make is None:
        raise ValueError(f"guided_decoding_guide_type: one of {', '.join(GUIDE_KINDS)}, got {shorten(kind)}")
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_GUIDE_BYTES:
        raise ValueError(f"guided_decoding_guide: at most {MAX_GUIDE_BYTES} bytes, got {size}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise refusal(kind, text, "it holds half of a surrogate pair")
    try:
        return make(text)
    except ValueError as error:
        raise refusal(kind, text, str(error)) from error


def refusal(kind: str, text: str, reason: str) -> ValueError:
    """The error of a guide that cannot be honoured."""
    return ValueError(f"guided_decoding_guide: {_ALLOWED[kind]}, got {shorten(text)}: {reason}")


def excess(text: str, reason: str) -> str:
    """The text of the error of a guide that takes more than the engine's limits."""
    return f"guided_decoding_guide: a grammar within the engine's limits, got {shorten(text)}: {reason}"


def _json_object(text: str) -> str:
    if text.strip():
        raise ValueError("any object is allowed; a schema is of type json_schema")
    return _schema_grammar({"type": "object"})


def _json_schema(text: str) -> str:
    schema = _parsed(text)
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object or a boolean")
    settle_schema(schema)
    return _schema_grammar({} if schema is True else {"enum": []} if schema is False else schema)


def _schema_grammar(schema: dict[str, Any]) -> str:
    return _lark("start: %json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}))


def _regex(text: str) -> str:
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
    return _lark(grammar["lark_grammar"])


def _ebnf(text: str) -> str:
    return _lark(lark_of(text))


def _choice(text: str) -> str:
    choices = _parsed(text)
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise ValueError("it is no list of strings")
    if not choices:
        raise ValueError("the list is empty")
    literals = ("".join("\\" + char if char in _REGEX_SYNTAX else char for char in each) for each in choices)
    return _regex("(?:" + "|".join(literals) + ")")


def _lark(rules: str) -> str:
    return LLMatcher.grammar_from_lark(_NO_FORCING + rules)


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_NESTING}") from error
    level, depth = [value], 0
    while level:
        level = [child for each in level for child in _children(each)]
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(f"it is nested deeper than {MAX_NESTING}")
    return value


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


_MAKERS: dict[str, Callable[[str], str]] = {
    "json": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "ebnf_grammar": _ebnf,
    "choice": _choice,
}
_ALLOWED = {
    "json": "empty for type json",
    "json_schema": "a JSON schema that llguidance can follow",
    "regex": "a regular expression that some text matches, without look-around and back-references",
    "ebnf_grammar": "rules in EBNF (root ::= ...) that some text follows",
    "choice": "a JSON list of strings that are not all empty",
}
