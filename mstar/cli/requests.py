"""Requests of ``mstar generate``: from options and JSON lines to mappings as ``LLM.generate`` takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.cli.errors import InputError
from mstar.runtime.json_text import parse_json
from mstar.runtime.requests import split_request
from mstar.utils.errors import InvalidArgument, MstarError


@dataclass(frozen=True)
class Request:
    """One prompt and its own parameters by name; ``place`` is where they were given, for error messages."""

    options: Mapping[str, Any]
    place: str = ""


def request_of(options: Mapping[str, Any], place: str = "") -> Request:
    """A request of exactly one prompt and any request parameters, checked as far as that goes without the model.

    Raises:
        InvalidArgument: no prompt or several, an unknown name, or a value outside its contract.
    """
    _, parameters = split_request(options)
    if parameters.get("exclude_input_in_output") is False:
        raise InvalidArgument("exclude_input_in_output", "true or absent: only the completion is printed", False)
    return Request(options, place)


def read_requests(file: Path) -> list[Request]:
    """The requests of a JSON-lines file, one object a line; blank lines are skipped.

    Raises:
        InputError: the file cannot be read, holds no request, or a line is wrong; names the line.
    """
    requests = []
    for number, line in _lines(file):
        place = f"{file}, line {number}"
        try:
            options = parse_json(line)
            if not isinstance(options, dict):
                raise InvalidArgument("request", "a JSON object", options)
            requests.append(request_of(options, place))
        except ValueError as error:
            raise InputError(f"{place}: not JSON: {error}") from None
        except MstarError as error:
            raise InputError(f"{place}: {error}") from None
    if not requests:
        raise InputError(f"{file}: holds no request")
    return requests


def parse_ids(text: str) -> list[int]:
    """Token ids from ``1,2,3``, ``1 2 3`` or ``[1, 2, 3]``."""
    try:
        return [int(number) for number in text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()]
    except ValueError:
        raise InvalidArgument("prompt_ids", "token ids parted by commas", text) from None


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8") as handle:
            for number, line in enumerate(handle, start=1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
