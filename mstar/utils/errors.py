"""Errors that may reach a client, and the Triton error code each one maps to."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

MAX_ECHO = 200  # characters of an offending value that an error message repeats


class ErrorCode(StrEnum):
    """Names of the error codes a Triton Python-backend response can carry."""

    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    CANCELLED = "CANCELLED"


class MstarError(Exception):
    """Base of every error whose text is meant for a client or an operator."""

    code: ErrorCode = ErrorCode.INTERNAL


class InvalidArgument(MstarError):
    """A value a client sent is outside its contract.

    The message reads ``<field>: <allowed>, got <value>``; the value is cut to ``MAX_ECHO`` characters.
    """

    code = ErrorCode.INVALID_ARG

    def __init__(self, field: str, allowed: str, got: Any) -> None:
        self.field = field
        super().__init__(f"{field}: {allowed}, got {shorten(got)}")


class Unsupported(MstarError):
    """A feature was asked for that this model or build does not have."""

    code = ErrorCode.UNSUPPORTED

    def __init__(self, field: str, allowed: str, got: Any) -> None:
        self.field = field
        super().__init__(f"{field}: {allowed}, got {shorten(got)}")


class Unavailable(MstarError):
    """The engine cannot take the request now: full, draining, starting or dead."""

    code = ErrorCode.UNAVAILABLE


class Cancelled(MstarError):
    """The client cancelled the request."""

    code = ErrorCode.CANCELLED


class EngineFault(MstarError):
    """The engine failed while it ran the request."""

    code = ErrorCode.INTERNAL


class LoadError(MstarError):
    """An option, a file or a tensor makes the model impossible to load; the message names it."""

    code = ErrorCode.INVALID_ARG


def shorten(value: Any) -> str:
    """``repr(value)`` in printable ASCII, cut to ``MAX_ECHO`` characters."""
    if isinstance(value, str | bytes):
        value = value[: MAX_ECHO + 1]  # a megabyte of prompt is not worth a repr
    text = ascii(value)
    return text if len(text) <= MAX_ECHO + 8 else text[:MAX_ECHO] + "..."
