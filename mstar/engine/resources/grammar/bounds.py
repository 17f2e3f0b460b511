"""Bounds of numbers in JSON schemas, rewritten so that llguidance keeps them.

It writes the numbers of an interval as a pattern.  Where an excluded integer k is the end nearer to zero and the other
end lies before the next integer, as in (0, 0.5] or [-1.5, -1), its pattern lets the text ``k`` through.  There the
interval begins at the next double instead, or at :data:`NEXT_TO_ZERO`: 1e-60, since a pattern can tell no more than
some hundred decimals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

NEXT_TO_ZERO = 1e-60
_INT64_MAX = 2**63 - 1  # llguidance holds bounds of integers in 64 bits, larger ones cut to this

_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def settle_bounds(nodes: Sequence[dict[str, Any]]) -> None:
    """Rewrites the bounds of a schema's ``nodes`` in place.  What several of them say of one number may be merged, so
    a bound counts as any other's other end.

    Raises:
        ValueError: a bound that llguidance would round to a laxer one.
    """
    for node in nodes:
        for inclusive, exclusive in (_LOWER, _UPPER):
            _settle_draft4(node, inclusive, exclusive)
        for name in (*_LOWER, *_UPPER):
            _check(name, node.get(name))
    lowers, uppers = _values(nodes, _LOWER), _values(nodes, _UPPER)
    for node in nodes:
        low, high = node.get(_LOWER[1]), node.get(_UPPER[1])
        if _is_integer(low) and low >= 0 and any(low < upper < low + 1 for upper in uppers):
            node[_LOWER[1]] = math.nextafter(low, math.inf) if low else NEXT_TO_ZERO
        if _is_integer(high) and high <= 0 and any(high - 1 < lower < high for lower in lowers):
            node[_UPPER[1]] = math.nextafter(high, -math.inf) if high else -NEXT_TO_ZERO


def _settle_draft4(node: dict[str, Any], inclusive: str, exclusive: str) -> None:
    """In draft 4 a boolean beside a bound says whether it is excluded."""
    flag = node.get(exclusive)
    if isinstance(flag, bool):
        del node[exclusive]
        if flag and inclusive in node:
            node[exclusive] = node.pop(inclusive)


def _check(name: str, bound: Any) -> None:
    """Other types than numbers are llguidance's to refuse."""
    if not _is_number(bound) or (name == "maximum" and bound == _INT64_MAX):
        return
    try:
        rounded = float(bound)
    except OverflowError:
        rounded = -math.inf if name in _LOWER else math.inf
    if rounded < bound if name in _LOWER else rounded > bound:
        raise ValueError(f"{name} must be a number that a double holds, got {bound}")


def _values(nodes: Sequence[dict[str, Any]], names: Sequence[str]) -> set[float]:
    return {node[name] for node in nodes for name in names if _is_number(node.get(name))}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> TypeGuard[float]:
    return _is_number(value) and value == value // 1
