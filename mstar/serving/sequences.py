"""The sequences that answer one request, and the tickets they run under."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mstar.runtime.messages import NO_TOKEN, FinishReason
from mstar.serving.chunks import Chunk, Reply
from mstar.serving.responses import Stream

SEQUENCE_BITS = 16
MAX_SEQUENCES = 1 << SEQUENCE_BITS

TellPrompt = Callable[[np.ndarray], str]


def ticket_of(number: int, index: int) -> int:
    """The ticket of a request's sequence; ``number`` is the front end's own for the request, never used twice."""
    return number << SEQUENCE_BITS | index


def split_ticket(ticket: int) -> tuple[int, int]:
    """The request that a ticket belongs to, and the sequence's index in it."""
    return ticket >> SEQUENCE_BITS, ticket & (MAX_SEQUENCES - 1)


class Sequences:
    """One reply's sequences.  After it was opened, only the sender thread that holds it changes it.

    Each streams for itself, with its index in every response; not streaming, one response has what all of them
    brought.  The reply is over when the last one ended.

    A sequence is *late* whose time was over before it ran.  Once all others have ended it ends as they do at that time,
    with finish ``TIMEOUT``, and no tokens; a request all of whose sequences are late has nothing to answer.
    """

    __slots__ = (
        "_ended",
        "_late",
        "_num_running",
        "_streaming",
        "_tell_prompt",
        "is_abandoned",
        "reply",
        "request_id",
        "streams",
    )

    def __init__(
        self,
        reply: Reply,
        streams: Sequence[Stream],
        *,
        streaming: bool,
        tell_prompt: TellPrompt | None = None,
        request_id: str = "",
    ) -> None:
        """``tell_prompt`` makes the JSON of a prompt's log-probabilities from their records."""
        self.reply = reply
        self.streams = streams
        self.request_id = request_id
        self.is_abandoned = False  # the engine was told to drop what still runs; written by any thread
        self._streaming = streaming
        self._tell_prompt = tell_prompt
        self._ended: list[Chunk | None] = [None] * len(streams)  # last chunks
        self._late: set[int] = set()
        self._num_running = len(streams)  # late ones included

    @property
    def is_over(self) -> bool:
        return self._num_running == 0

    def running(self, number: int) -> list[int]:
        """Tickets of those that have not ended; may be asked from any thread."""
        return [ticket_of(number, index) for index in range(len(self.streams)) if not self.has_ended(index)]

    def has_ended(self, index: int) -> bool:
        """Whether the engine runs the sequence no more."""
        return self._ended[index] is not None or index in self._late

    def tell_prompt(self, records: np.ndarray) -> None:
        """What is told of the prompt, which the sequences have in common: the first one's first response has it."""
        if self._tell_prompt is not None:
            self.streams[0].tell_prompt(self._tell_prompt(records))

    def take(
        self, index: int, tokens: Sequence[int], finish: int, records: np.ndarray | None
    ) -> Sequence[Sequence[Chunk]]:
        """Add a sequence's rows, as :meth:`Stream.take`; returns the chunks of each response to send."""
        chunk = self.streams[index].take(tokens, finish, records)
        if chunk is None:
            return ()
        if chunk.finish_reason is not None:
            self._end(index, chunk)
        return self._responses([chunk, *self._ends_of_late()])

    def take_late(self, index: int) -> Sequence[Sequence[Chunk]] | None:
        """A sequence is late; returns as :meth:`take`, None when all are."""
        self._late.add(index)
        return None if len(self._late) == len(self.streams) else self._responses(self._ends_of_late())

    def _end(self, index: int, chunk: Chunk) -> None:
        self._ended[index] = chunk
        self._num_running -= 1

    def _ends_of_late(self) -> list[Chunk]:
        """Ends the late ones, if only they are left; returns their chunks."""
        if self._num_running > len(self._late):
            return []
        chunks = []
        for index in sorted(self._late):
            chunk = self.streams[index].take([NO_TOKEN], FinishReason.TIMEOUT)
            assert chunk is not None, "a last row makes a chunk"
            self._end(index, chunk)
            chunks.append(chunk)
        self._late.clear()
        return chunks

    def _responses(self, chunks: Sequence[Chunk]) -> Sequence[Sequence[Chunk]]:
        if self._streaming:
            return [(chunk,) for chunk in chunks]
        return [[last for last in self._ended if last is not None]] if self.is_over else ()
