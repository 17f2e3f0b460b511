"""``--option NAME=VALUE`` and its like, given several times, as a mapping."""

from __future__ import annotations

from mstar.cli.errors import InputError


def parse_assignments(pairs: list[str], flag: str = "--option") -> dict[str, str]:
    """Values by name, the last of a name.  InputError for one without ``=``."""
    options = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise InputError(f"{flag}: NAME=VALUE is needed, got {pair!r}")
        options[name] = value
    return options
