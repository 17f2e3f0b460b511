"""What a front end and an engine process say to each other: msgpack over a local socket.

Requests are named by tickets, 64-bit integers that a front end chooses and never uses twice.  A ticket ends with
exactly one of: a row of :class:`StepTokens` whose finish is not ``RUNNING``; a :class:`Failed`; the front end's own
:class:`Finish`, after which the engine says nothing more about it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from mstar.conductor.request import LOGPROB, NO_TOKEN, EngineRequest, FinishReason

__all__ = [
    "NO_TOKEN", "PROTOCOL", "Beat", "Bye", "Cancel", "EngineRequest", "Failed", "Finish", "FinishReason", "FromEngine",
    "Hello", "PromptTokens", "StepTokens", "Submit", "ToEngine", "TokenRows", "Welcome", "decode_from_engine",
    "decode_to_engine", "encode",
]  # fmt: skip

PROTOCOL = 3


class TokenRows(NamedTuple):
    """Rows of one or several steps, in order.

    ``tokens`` holds :data:`NO_TOKEN` or a :func:`~mstar.conductor.request.stop_code` where a row ends without output.
    ``logprobs``: records LOGPROB [m] of the rows at ``logprob_rows``, ascending; None where nobody asked.
    """

    tickets: np.ndarray  # int64 [n]
    tokens: np.ndarray  # int32 [n]
    finish: np.ndarray  # uint8 [n], FinishReason
    logprob_rows: np.ndarray | None = None  # int64 [m]
    logprobs: np.ndarray | None = None


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An array on the wire, its first element the class's name."""


class Hello(_Message, frozen=True, array_like=True, tag=True):
    """A front end arrives; ``presence`` is the name of its record in the engine's folder."""

    pid: int
    presence: str
    protocol: int = PROTOCOL


class Beat(_Message, frozen=True, array_like=True, tag=True):
    """A front end is alive."""


class Bye(_Message, frozen=True, array_like=True, tag=True):
    """A front end leaves; what it still runs is dropped."""


class Submit(_Message, frozen=True, array_like=True, tag=True):
    """Asks for a request to run under ``ticket``, the stub's own number for it."""

    ticket: int
    request: EngineRequest


class Cancel(_Message, frozen=True, array_like=True, tag=True):
    """Ends the request with finish ``CANCELLED``."""

    ticket: int


class Finish(_Message, frozen=True, array_like=True, tag=True):
    """The front end found the text's end after ``kept_tokens``; nothing more is sent for the ticket."""

    ticket: int
    kept_tokens: int


class Welcome(_Message, frozen=True, array_like=True, tag=True):
    """The model is loaded.  What a front end needs to know of the engine it talks to."""

    model: str
    vocab_size: int
    max_seq_len: int
    max_running_requests: int
    max_queued_requests: int
    max_queued_tokens: int
    num_parameters: int
    weight_bytes: int
    device: str
    dtype: str
    load_seconds: float


class StepTokens(_Message, frozen=True, array_like=True, tag=True):
    """One step's rows of one front end, as raw bytes of what :class:`TokenRows` has."""

    tickets: bytes
    tokens: bytes
    finish: bytes
    logprob_rows: bytes = b""
    logprobs: bytes = b""

    def rows(self) -> TokenRows:
        return TokenRows(
            np.frombuffer(self.tickets, dtype="<i8"),
            np.frombuffer(self.tokens, dtype="<i4"),
            np.frombuffer(self.finish, dtype="u1"),
            np.frombuffer(self.logprob_rows, dtype="<i8") if self.logprob_rows else None,
            np.frombuffer(self.logprobs, dtype=LOGPROB) if self.logprobs else None,
        )


class PromptTokens(_Message, frozen=True, array_like=True, tag=True):
    """What was asked about a prompt's tokens, before the ticket's first row: records LOGPROB [tokens - 1] as bytes."""

    ticket: int
    logprobs: bytes

    def records(self) -> np.ndarray:
        return np.frombuffer(self.logprobs, dtype=LOGPROB)


class Failed(_Message, frozen=True, array_like=True, tag=True):
    """A request ended with an error; ``code`` names an :class:`~mstar.utils.errors.ErrorCode`."""

    ticket: int
    code: str
    message: str


ToEngine: TypeAlias = Hello | Beat | Bye | Submit | Cancel | Finish
FromEngine: TypeAlias = Welcome | StepTokens | PromptTokens | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
