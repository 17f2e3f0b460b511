"""What of JSON schemas is refused or rewritten because llguidance would make texts of it that break it, or never end.

It refuses by itself what it does not know (``not``, ``if``, ``contains``, ``uniqueItems``, ``dependentRequired``, a
``oneOf`` whose options may overlap, ...), so what is left is here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote

from mstar.engine.resources.grammar.bounds import settle_bounds
from mstar.engine.resources.grammar.formats import ANY_STRING, FORMATS, settle_format
from mstar.engine.resources.grammar.unions import settle_one_of
from mstar.utils.errors import shorten

MAX_MULTIPLE = 100_000  # of the least decimal: the states that the automaton of multiples has
MAX_PATTERNS = 64  # patternProperties of one object, each compared with every other

# As JSON: control characters that only a \\u escape can write, which texts do not have, and DEL, which none has.
_UNWRITABLE = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01][0-9a-f]|7f)")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalItems", "additionalProperties")


def settle_schema(schema: Any) -> None:
    """Rewrites a schema, parsed from JSON, in place where llguidance would not keep it, or refuses it.

    Raises:
        ValueError: says which keyword, or that no value of the schema comes to an end.
    """
    nodes = list(_nodes(schema))
    for node in nodes:
        _check_reference(node, is_root=node is schema)
        settle_one_of(node, lambda ref: _target(schema, ref))
    settle_bounds(nodes)
    multiple = 1
    for node in nodes:
        _check_keywords(node)
        multiple = math.lcm(multiple, _digits_of(node.get("multipleOf", 1)))
        if multiple > MAX_MULTIPLE:
            raise ValueError(f"all multipleOf, their decimal points left out, must divide a number <= {MAX_MULTIPLE}")
    if not isinstance(schema, dict):
        return
    endings = _Endings(schema, nodes)
    if not endings.ends(schema):
        raise ValueError("its recursion never ends: no value satisfies it")
    for node in nodes:
        if not endings.ends(node):  # a text could begin with such a value, as that of an optional property
            node.clear()
            node["enum"] = []
        settle_format(node)


def _check_keywords(node: Mapping[str, Any]) -> None:
    type_ = node.get("type", "string")
    format_ = node.get("format")
    if (
        format_ is not None
        and "string" in (type_ if isinstance(type_, list) else [type_])
        and format_ not in (*FORMATS, *ANY_STRING)
    ):
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {shorten(format_)}")
    step = node.get("multipleOf", 1)
    if isinstance(step, int | float) and step <= 0:
        raise ValueError(f"multipleOf must be above 0, got {shorten(step)}")
    # Names of properties that are not listed may come twice, and count once then.
    least, required = node.get("minProperties", 0), node.get("required", [])
    most_sure = len(set(map(str, required))) + 1 if isinstance(required, list) else 1
    if isinstance(least, int | float) and least > most_sure:
        raise ValueError(f"minProperties must be at most {most_sure}, one more than are required, got {least}")
    named = node.get("properties")
    literals = [node.get("const"), node.get("enum"), required, list(named) if isinstance(named, dict) else None]
    if _UNWRITABLE.search(json.dumps(literals)):
        raise ValueError("const, enum and names of properties must have no control characters but \\b \\f \\n \\r \\t")
    patterns = node.get("patternProperties", {})
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERNS:
        raise ValueError(f"patternProperties must have at most {MAX_PATTERNS} patterns, got {len(patterns)}")


def _check_reference(node: Mapping[str, Any], is_root: bool) -> None:
    """Any other reference would lead to schemas that are not looked at here."""
    ref = node.get("$ref", "#")
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        raise ValueError(f"$ref must point into the schema (#/...), got {shorten(ref)}")
    if "$id" in node and not is_root:
        raise ValueError(f"$id must stand at the top of the schema alone, got {shorten(node['$id'])}")


def _digits_of(number: Any) -> int:
    """A number's decimal digits as an integer; 1 for what is no positive number, which is refused elsewhere."""
    try:
        sign, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    except InvalidOperation:
        return 1
    if sign or not isinstance(exponent, int) or not any(digits):
        return 1
    return int("".join(map(str, digits))) * 10 ** min(max(exponent, 0), 6)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema within a schema, itself included, and every one that a reference leads to."""
    pending, seen = [schema], set()
    while pending:
        node = pending.pop()
        if isinstance(node, dict) and id(node) not in seen:
            seen.add(id(node))
            yield node
            pending.extend(_below(node))
            if isinstance(ref := node.get("$ref"), str):
                pending.append(_target(schema, ref))


def _below(node: Mapping[str, Any]) -> Iterator[Any]:
    for key in _MAPS:
        if isinstance(value := node.get(key), dict):
            yield from value.values()
    for key in _LISTS:
        if isinstance(value := node.get(key), list):
            yield from value
    for key in _SINGLES:
        value = node.get(key)
        yield from value if isinstance(value, list) else (value,)


class _Endings:
    """Which schemas some finite value may satisfy, keywords taken one by one: what cannot be told counts as ending."""

    def __init__(self, root: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
        self._ending: set[int] = set()
        self._targets = {id(node): _target(root, node["$ref"]) for node in nodes if isinstance(node.get("$ref"), str)}
        moving = nodes
        while moving:
            new = [node for node in moving if self._ends_now(node)]
            self._ending.update(map(id, new))
            moving = [node for node in moving if id(node) not in self._ending] if new else []

    def ends(self, schema: Any) -> bool:
        return not isinstance(schema, dict) or id(schema) in self._ending

    def _ends_now(self, node: dict[str, Any]) -> bool:
        if not self.ends(self._targets.get(id(node), True)):
            return False
        if not all(any(map(self.ends, node[key])) for key in ("anyOf", "oneOf") if _is_full_list(node.get(key))):
            return False
        if _is_full_list(node.get("allOf")) and not all(map(self.ends, node["allOf"])):
            return False
        types = node.get("type")
        types = [types] if isinstance(types, str) else types
        if "const" in node or "enum" in node or not isinstance(types, list):
            return True
        return any(self._type_ends(each, node) for each in types) or not types

    def _type_ends(self, type_: Any, node: dict[str, Any]) -> bool:
        if type_ == "object":
            required, named = node.get("required", []), node.get("properties", {})
            if not isinstance(required, list) or not isinstance(named, dict):
                return True
            other = node.get("additionalProperties", True)
            return all(self.ends(named.get(name, other)) for name in required if isinstance(name, str))
        if type_ == "array":
            least, first = node.get("minItems", 0), node.get("prefixItems", [])
            if not isinstance(least, int | float) or not isinstance(first, list):
                return True
            return all(map(self.ends, first[: int(least)])) and (least <= len(first) or self.ends(node.get("items")))
        return True


def _target(root: Any, ref: str) -> Any:
    """The schema at a pointer into this document; True where it points elsewhere."""
    if not ref.startswith("#"):
        return True
    node: Any = root
    for part in unquote(ref[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(part, True)
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            return True
    return node


def _is_full_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)
