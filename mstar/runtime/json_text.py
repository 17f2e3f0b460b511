"""JSON as people send it: a key given twice is a mistake, not silently the last of the two."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKey(ValueError):
    """An object has a key twice; ``key`` is it."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"each key once, not twice {key!r}")


def parse_json(text: str, *, allow_nan: bool = True) -> Any:
    """The value of a JSON text.

    ``allow_nan``: NaN and infinities pass, for whoever reads the numbers to refuse them by name.

    Raises:
        DuplicateKey: an object at any depth has a key twice.
        ValueError: no JSON, or nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=float if allow_nan else _no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKey(next(key for key in keys if keys.count(key) > 1))
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
