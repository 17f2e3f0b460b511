"""Formats of strings in JSON schemas, narrowed where llguidance knows no calendar and no longest name."""

from __future__ import annotations

from typing import Any

ANY_STRING = ("password", "binary", "path", "file-path", "directory-path")  # tell people, not what may be in the text
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

_YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_DAY = r"(?:(?:0[1-9]|1[0-2])-(?:0\d|1\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_FOURTH = r"(?:0[48]|[2468][048]|[13579][26])"  # of a hundred years, without the first
_DATE = rf"(?:{_YEAR}-{_DAY}|(?:\d\d{_FOURTH}|{_FOURTH}00)-02-29)"
_TIME = r"\d\d:\d\d:[0-5]\d.*"  # a second 60 is one of a few in history
_BESIDE: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}$"},
    "hostname": {"maxLength": 253},
}


def settle_format(node: dict[str, Any]) -> None:
    """Drops, in place, a format that any string has, and adds what others leave out: a date is in the calendar (years
    0001 to 9999), a second below 60, a host's name at most 253 characters long."""
    if node.get("format") in ANY_STRING:
        del node["format"]
    format_, others = node.get("format"), node.get("allOf", [])
    if isinstance(format_, str) and format_ in _BESIDE and isinstance(others, list):
        node["allOf"] = [*others, _BESIDE[format_]]
