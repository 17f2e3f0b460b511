"""Who asks for what, and when: a trace as columns, and as a file with one JSON object per request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from mstar.conductor.request import MAX_PRIORITY
from mstar.simulate.tokens import stream_tokens
from mstar.utils.errors import LoadError

NOBODY = -1
SYSTEM_STREAMS = 1 << 40  # numbers of streams from here on are those of shared beginnings


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request.  It comes ``arrival`` seconds after the start; with ``think``, that many seconds after the end of
    the request before it in its ``session`` instead.

    Requests of a session have one stream of tokens: a prompt begins with the prompts and answers before it.  Those with
    one ``system`` begin alike: of both prompts as many tokens as the lesser ``system_tokens`` are equal.
    ``max_tokens`` is what is asked for, where the answer of ``output_tokens`` ends before that.
    """

    prompt_tokens: int
    output_tokens: int
    arrival: float | None = None
    think: float | None = None
    max_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    session: str | None = None
    system: str | None = None
    system_tokens: int = 0


@dataclass(frozen=True, eq=False)
class Trace:
    """Columns [requests], int64.  A request's ticket is its index.

    ``due_ns``: its arrival, or if ``follows`` names a ticket, the time from that one's end to its arrival.
    ``streams``: which stream of tokens its prompt and answer are from, but for the first ``system_tokens`` of the
    prompt, which are from a stream that others begin with, too, that of ``systems`` (:data:`NOBODY`: none).  Both are
    the same for all requests of a stream.  ``tenants`` index ``tenant_names``.
    """

    due_ns: np.ndarray
    follows: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    max_tokens: np.ndarray
    priorities: np.ndarray
    tenants: np.ndarray
    streams: np.ndarray
    systems: np.ndarray
    system_tokens: np.ndarray
    tenant_names: tuple[str, ...] = ("",)

    def __len__(self) -> int:
        return self.due_ns.size

    @property
    def shares_streams(self) -> bool:
        """Whether some prompt may begin as another's prompt or answer does."""
        return np.unique(self.streams).size < len(self) or bool(self.system_tokens.any())

    def prompt(self, ticket: int) -> bytes:
        """A request's prompt, int32 little endian."""
        positions = np.arange(self.prompt_tokens[ticket])
        tokens = stream_tokens(int(self.streams[ticket]), positions)
        if shared := int(self.system_tokens[ticket]):
            tokens[:shared] = self.system(ticket)[: tokens.size]
        return tokens.astype("<i4").tobytes()

    def system(self, ticket: int) -> np.ndarray:
        """The beginning that a request shares, int64 [system_tokens]."""
        return stream_tokens(SYSTEM_STREAMS + int(self.systems[ticket]), np.arange(self.system_tokens[ticket]))

    def lines(self) -> Iterable[TraceLine]:
        """As they stand in a file."""
        names, uses = np.unique(self.streams, return_counts=True)
        shared = set(names[uses > 1].tolist())
        for ticket in range(len(self)):
            seconds, asked = float(self.due_ns[ticket]) / 1e9, int(self.max_tokens[ticket])
            follows = self.follows[ticket] != NOBODY
            answered = int(self.output_tokens[ticket])
            yield TraceLine(
                prompt_tokens=int(self.prompt_tokens[ticket]),
                output_tokens=answered,
                arrival=None if follows else seconds,
                think=seconds if follows else None,
                max_tokens=None if asked == answered else asked,
                priority=int(self.priorities[ticket]),
                tenant=self.tenant_names[self.tenants[ticket]],
                session=str(self.streams[ticket]) if int(self.streams[ticket]) in shared else None,
                system=str(self.systems[ticket]) if self.systems[ticket] != NOBODY else None,
                system_tokens=int(self.system_tokens[ticket]),
            )


def make_trace(
    due_s: np.ndarray,
    prompt_tokens: np.ndarray,
    output_tokens: np.ndarray,
    *,
    follows: np.ndarray | None = None,
    streams: np.ndarray | None = None,
    systems: np.ndarray | None = None,
    system_tokens: np.ndarray | None = None,
) -> Trace:
    """A trace of one tenant and one priority; without ``streams`` and ``systems`` no prompt begins as another."""
    count = due_s.size
    return Trace(
        due_ns=(due_s * 1e9).astype(np.int64),
        follows=np.full(count, NOBODY) if follows is None else follows,
        prompt_tokens=prompt_tokens.astype(np.int64),
        output_tokens=output_tokens.astype(np.int64),
        max_tokens=output_tokens.astype(np.int64),
        priorities=np.zeros(count, np.int64),
        tenants=np.zeros(count, np.int64),
        streams=np.arange(count) if streams is None else streams,
        systems=np.full(count, NOBODY) if systems is None else systems,
        system_tokens=np.zeros(count, np.int64) if system_tokens is None else system_tokens,
    )


def read_trace(file: Path) -> Trace:
    """A trace from a file of :class:`TraceLine`, one to a line, in any order of arrival.

    Raises:
        LoadError: it cannot be read, or a line is wrong; says which and why.
    """
    decoder, lines = msgspec.json.Decoder(TraceLine), []
    try:
        with file.open("rb") as opened:
            for number, text in enumerate(opened, 1):
                if text.strip():
                    try:
                        lines.append(_checked(decoder.decode(text)))
                    except (msgspec.MsgspecError, ValueError) as error:
                        raise LoadError(f"{file}, line {number}: {error}") from None
    except OSError as error:
        raise LoadError(f"{file}: {error.strerror}") from None
    if not lines:
        raise LoadError(f"{file}: it has no requests")
    try:
        return trace_of(lines)
    except ValueError as error:
        raise LoadError(f"{file}: {error}") from None


def write_trace(trace: Trace, file: Path) -> None:
    """The trace as :func:`read_trace` reads it."""
    encoder = msgspec.json.Encoder()
    with file.open("wb") as opened:
        opened.writelines(encoder.encode(line) + b"\n" for line in trace.lines())


def trace_of(lines: Sequence[TraceLine]) -> Trace:
    """The columns of requests whose lines are right by themselves.

    Raises:
        ValueError: one with ``think`` has nobody before it in its session, or not the same beginning.
    """
    tenants: dict[str, int] = {}
    sessions: dict[str, int] = {}
    named: dict[str, int] = {}
    last_of: dict[int, int] = {}
    count = len(lines)
    follows, streams, systems, tenant_of = (np.full(count, NOBODY) for _ in range(4))
    for ticket, line in enumerate(lines):
        tenant_of[ticket] = tenants.setdefault(line.tenant, len(tenants))
        stream = ticket if line.session is None else count + sessions.setdefault(line.session, len(sessions))
        if line.think is not None:
            if stream not in last_of:
                raise ValueError(f"request {ticket + 1} has think, but nobody is before it in its session")
            follows[ticket] = last_of[stream]
        if line.system is not None:
            systems[ticket] = named.setdefault(line.system, len(named))
        before = lines[last_of.get(stream, ticket)]
        if (before.system, before.system_tokens) != (line.system, line.system_tokens):
            raise ValueError(f"request {ticket + 1} has another system than those before it in its session")
        last_of[stream] = ticket
        streams[ticket] = stream
    due_s = np.array([line.arrival if line.think is None else line.think for line in lines], np.float64)
    return Trace(
        due_ns=(due_s * 1e9).astype(np.int64),
        follows=follows,
        prompt_tokens=np.array([line.prompt_tokens for line in lines], np.int64),
        output_tokens=np.array([line.output_tokens for line in lines], np.int64),
        max_tokens=np.array([line.max_tokens or line.output_tokens for line in lines], np.int64),
        priorities=np.array([line.priority for line in lines], np.int64),
        tenants=tenant_of,
        streams=streams,
        systems=systems,
        system_tokens=np.array([line.system_tokens for line in lines], np.int64),
        tenant_names=tuple(tenants),
    )


def _checked(line: TraceLine) -> TraceLine:
    if (line.arrival is None) == (line.think is None):
        raise ValueError("give either arrival or think")
    if line.think is not None and line.session is None:
        raise ValueError("think needs a session")
    if min(line.arrival or 0, line.think or 0) < 0 or max(line.arrival or 0, line.think or 0) > 1e9:
        raise ValueError("arrival and think are seconds from 0 to 1e9")
    if line.prompt_tokens < 1 or line.output_tokens < 1:
        raise ValueError("prompt_tokens and output_tokens are at least 1")
    if not 0 <= line.system_tokens <= line.prompt_tokens or (line.system is None) != (line.system_tokens == 0):
        raise ValueError("system and system_tokens, from 1 to prompt_tokens, go together")
    if abs(line.priority) > MAX_PRIORITY:
        raise ValueError(f"priority is from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    if line.max_tokens is not None and line.max_tokens < line.output_tokens:
        raise ValueError("max_tokens is at least output_tokens")
    return line
