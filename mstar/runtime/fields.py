"""A named, typed, bounded value: how a client's or an operator's value becomes a Python value, or an error."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from mstar.runtime.json_text import DuplicateKey, parse_json
from mstar.utils.errors import InvalidArgument

Kind = Literal["int", "float", "bool", "str", "strings", "ints", "bytes", "biases", "json"]

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT32_MAX = 3.4028234663852886e38
_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?\s*", re.ASCII)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B?\s*", re.ASCII | re.IGNORECASE)
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True)
class Field:
    """One row of a table of parameters or options.

    ``default`` None means unset.  ``low`` and ``high`` are inclusive unless ``above_low``; they bound numbers,
    the length of every string, and each entry of a list.  ``min_items`` and ``max_items`` bound a list.  ``choices``
    are the allowed strings.  ``allowed`` is the sentence an error message gives.

    Kinds beyond the obvious: ``bytes`` is a size; ``biases`` an object of token ids to numbers, each cut to ``low`` ..
    ``high``; ``json`` a text, or any JSON value, which becomes its text.
    """

    name: str
    kind: Kind
    doc: str
    default: Any = None
    unit: str = ""
    low: float | int | None = None
    high: float | int | None = None
    above_low: bool = False
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    min_items: int = 0
    max_items: int = 64

    @property
    def allowed(self) -> str:
        """What the field takes, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = _NOUNS[self.kind]
        if self.kind == "biases":
            return f"{noun}{self._item_bound()}"
        if self.kind == "bool" or (self.low is None and self.high is None):
            return noun
        if self.kind in ("str", "strings", "json"):
            return f"{noun} of {self.low} to {self.high} characters" + self._item_bound()
        low = "" if self.low is None else f"{'>' if self.above_low else '>='} {_show(self.low)}"
        high = "" if self.high in (None, FLOAT32_MAX) else f"<= {_show(self.high)}"
        return f"{noun} {' and '.join(part for part in (low, high) if part)}" + self._item_bound()

    def coerce(self, value: Any, given_as: str | None = None) -> Any:
        """The value in the field's own type; an error names the field as ``given_as``.

        ``None`` is the default.  Numbers may be strings or whole floats; a bool is never a number; NaN and
        infinities are refused in every spelling.

        Raises:
            InvalidArgument: names the field, what is allowed, and the value.
        """
        if value is None:
            return self.default
        if given_as not in (None, self.name):
            return replace(self, name=given_as).coerce(value)
        match self.kind:
            case "int":
                return self._integer(value)
            case "bytes":
                return self._integer(_expand_size(value))
            case "float":
                return self._float(value)
            case "bool":
                return self._bool(value)
            case "str":
                return self._string(value)
            case "ints":
                return tuple(self._integer(item) for item in self._items(value))
            case "strings":
                return tuple(dict.fromkeys(self._string(item) for item in self._items(value)))
            case "biases":
                return self._biases(value)
            case "json":
                return self._string(value if isinstance(value, str) else self._json_text(value))

    def refuse(self, value: Any) -> InvalidArgument:
        """The error for a value outside the field's contract."""
        if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
            value = f"an integer of {value.bit_length()} bits"  # printing one is quadratic, and capped by Python
        return InvalidArgument(self.name, self.allowed, value)

    def _item_bound(self) -> str:
        if self.kind not in ("strings", "ints", "biases"):
            return ""
        count = f"{self.min_items} to {self.max_items}" if self.min_items else f"at most {self.max_items}"
        return f", {count} of them"

    def _integer(self, value: Any) -> int:
        if _is_bool(value):
            raise self.refuse(value)
        if isinstance(value, numbers.Integral):
            number: int | Decimal = int(value)
        elif isinstance(value, numbers.Real) and math.isfinite(value):
            number = Decimal(float(value))
        elif isinstance(value, str) and len(value) <= 64 and _NUMBER.fullmatch(value):
            try:
                number = Decimal(value.strip())
            except InvalidOperation:
                raise self.refuse(value) from None
        else:
            raise self.refuse(value)
        # bounds before the conversion: a short string can name a number of thousands of digits
        if not self._is_inside(number) or not -INT64_MAX - 1 <= number <= INT64_MAX or number != int(number):
            raise self.refuse(value)
        return int(number)

    def _float(self, value: Any) -> float:
        if _is_bool(value):
            raise self.refuse(value)
        try:
            if isinstance(value, str):
                number = float(value) if len(value) <= 64 and _NUMBER.fullmatch(value) else math.nan
            elif isinstance(value, numbers.Real):
                number = float(value)
            else:
                number = math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or not self._is_inside(number):
            raise self.refuse(value)
        return number + 0.0  # -0.0 becomes 0.0

    def _bool(self, value: Any) -> bool:
        if _is_bool(value):
            return bool(value)
        if isinstance(value, str) and value.strip().lower() in _WORDS:
            return _WORDS[value.strip().lower()]
        raise self.refuse(value)

    def _string(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refuse(value)
        if self.choices:
            if value not in self.choices:
                raise self.refuse(value)
        elif not self._is_inside(len(value)):
            raise self.refuse(value)
        return value

    def _items(self, value: Any) -> list[Any]:
        if isinstance(value, str):
            items: list[Any] = [value] if self.kind == "strings" else [part for part in value.split(",") if part]
        elif isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
            items = list(value)
        elif isinstance(value, numbers.Number) and self.kind == "ints":
            items = [value]
        else:
            raise self.refuse(value)
        self._check_count(len(items))
        return items

    def _check_count(self, count: int) -> None:
        if not self.min_items <= count <= self.max_items:
            raise InvalidArgument(self.name, self.allowed, f"{count} of them")

    def _biases(self, value: Any) -> dict[int, float]:
        """Ids as integers or their decimal text, as the keys of JSON are."""
        if isinstance(value, str):
            try:
                value = parse_json(value)
            except DuplicateKey as error:
                raise InvalidArgument(self.name, "each token id once", error.key) from None
            except ValueError:
                raise self.refuse(value) from None
        if not isinstance(value, Mapping):
            raise self.refuse(value)
        self._check_count(len(value))
        low, high = (math.inf * sign if bound is None else bound for sign, bound in ((-1, self.low), (1, self.high)))
        id_of = replace(self, kind="int", low=0, high=INT32_MAX)._integer
        bias_of = replace(self, kind="float", low=None, high=None)._float
        biases: dict[int, float] = {}
        for key, bias in value.items():
            try:
                token_id, number = id_of(key), bias_of(bias)
            except InvalidArgument:
                raise self.refuse({key: bias}) from None
            if token_id in biases:
                raise InvalidArgument(self.name, "each token id once", key)
            biases[token_id] = min(max(number, low), high)
        return biases

    def _json_text(self, value: Any) -> str:
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise self.refuse(value) from None

    def _is_inside(self, number: Any) -> bool:
        if self.low is not None and (number < self.low or (self.above_low and number == self.low)):
            return False
        return self.high is None or number <= self.high


_NOUNS: Mapping[Kind, str] = {
    "int": "an integer",
    "bytes": "a number of bytes (KiB, MiB, GiB may follow)",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a string",
    "strings": "strings",
    "ints": "integers",
    "biases": "an object of token ids to finite numbers",
    "json": "a string or JSON value",
}


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # numpy's, without importing it


def _expand_size(value: Any) -> Any:
    """``"512MiB"`` to bytes; anything else as it came."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) and len(value) <= 64 else None
    if found is None:
        return value
    return int(Decimal(found[1]) * 1024 ** ("KMGT".index(found[2].upper()) + 1))


def _show(bound: float | int) -> str:
    if bound == INT64_MAX:
        return "2^63-1"
    return str(bound) if isinstance(bound, int) or not float(bound).is_integer() else str(int(bound))
