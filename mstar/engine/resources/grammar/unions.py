"""``oneOf`` whose options exclude each other, as tagged unions do, said as ``anyOf``.

llguidance takes ``oneOf`` only where it sees by itself that no value fits two options, and it does not look at tags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

_MOST_COMPARED = 64  # options, each with every other
_LONGEST_CHAIN = 16  # references from one to the next

Resolve = Callable[[str], Any]


def settle_one_of(node: dict[str, Any], resolve: Resolve) -> None:
    """Rewrites a schema's ``oneOf`` in place where its options exclude each other.

    ``resolve`` gives the schema that a ``$ref`` leads to.
    """
    options = node.get("oneOf")
    if not isinstance(options, list) or "anyOf" in node or len(options) > _MOST_COMPARED:
        return
    seen = [_resolved(option, resolve) for option in options]
    if all(_exclude_each_other(one, other, resolve) for one, other in combinations(seen, 2)) or _requires_tag(
        seen, resolve
    ):
        node["anyOf"] = node.pop("oneOf")


def _requires_tag(options: list[Any], resolve: Resolve) -> bool:
    """Requires, in place, the property whose values tell all options apart, if they have one that may be left out.

    Generators of schemas leave out of ``required`` what has a default.  Texts with the tag are of one option alone.
    """
    if not all(isinstance(option, dict) and _types_of(option) == {"object"} for option in options):
        return False
    tags = [_tags_of(option, resolve, option.get("properties")) for option in options]
    for name in tags[0]:
        if all(name in each for each in tags) and all(_differ(a[name], b[name]) for a, b in combinations(tags, 2)):
            for option in options:
                required = option.setdefault("required", [])
                if isinstance(required, list) and name not in required:
                    required.append(name)
            return True
    return False


def _resolved(schema: Any, resolve: Resolve) -> Any:
    for _ in range(_LONGEST_CHAIN):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = resolve(schema["$ref"])
    return schema


def _exclude_each_other(one: Any, other: Any, resolve: Resolve) -> bool:
    """Whether no value fits both; False where that cannot be told."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    types = _types_of(one), _types_of(other)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if _differ(_literals_of(one), _literals_of(other)):
        return True
    if types != ({"object"}, {"object"}):
        return False
    tags = _tags_of(one, resolve, one.get("required")), _tags_of(other, resolve, other.get("required"))
    return any(_differ(tags[0][name], tags[1][name]) for name in tags[0].keys() & tags[1].keys())


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """Its types, integers as numbers; empty where it names none."""
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}


def _literals_of(schema: Any) -> list[Any] | None:
    """The only values that it allows; None where it names none."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _tags_of(schema: Mapping[str, Any], resolve: Resolve, names: Any) -> dict[str, list[Any]]:
    """Those of its properties ``names`` that are of few values, with these."""
    named = schema.get("properties")
    if not isinstance(names, list | dict) or not isinstance(named, dict):
        return {}
    tags = {name: _literals_of(_resolved(named.get(name), resolve)) for name in names if isinstance(name, str)}
    return {name: values for name, values in tags.items() if values is not None}


def _differ(some: list[Any] | None, others: list[Any] | None) -> bool:
    return some is not None and others is not None and not any(one == other for one in some for other in others)
