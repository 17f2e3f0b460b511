"""One stub's front end: open requests between the engine's tokens and the clients' responses. Knows no Triton."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mstar.conductor.deadlines import is_late
from mstar.runtime.messages import EngineRequest, FinishReason, TokenRows
from mstar.serving.cancels import CancelPoll
from mstar.serving.chunks import Chunk
from mstar.serving.rows import TicketRows
from mstar.serving.senders import Failure, Prompt, SenderPool
from mstar.serving.sequences import MAX_SEQUENCES, Sequences, split_ticket, ticket_of
from mstar.utils.errors import ErrorCode, MstarError, Unavailable

logger = logging.getLogger(__name__)

DRAINING = "the server is shutting down"


class Engine(Protocol):
    """What a front end needs of ``mstar.runtime.client.EngineClient``."""

    def submit(self, ticket: int, request: EngineRequest) -> None: ...

    def cancel(self, ticket: int) -> None: ...

    def finish(self, ticket: int, kept_tokens: int) -> None: ...

    def is_alive(self) -> bool: ...


class Frontend:
    """The listener of an engine client, and the owner of the open requests.

    ``_open`` maps numbers of requests to their sequences, each of which the engine knows under a ticket of its own.
    ``open`` adds; only the sender thread that holds a request removes it, and sends its last response: so there is
    exactly one, whatever races (tokens, failures, cancel, loss of the engine, drain).
    """

    def __init__(self, engine: Engine, *, num_senders: int = 4, drain_timeout_s: float = 20.0) -> None:
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._open: dict[int, Sequences] = {}
        self._numbers = itertools.count(1)
        self._refusal: str | None = None  # why new requests are turned away
        self._pool = SenderPool(self, num_senders)
        self._cancels = CancelPoll(self._open, self._on_cancel)
        self._cancels.start()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_ready(self) -> bool:
        return self._refusal is None and self._engine.is_alive()

    def check_accepting(self) -> None:
        """Raises Unavailable when a request need not even be read."""
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        if not self._engine.is_alive():
            raise Unavailable("the engine is not running")

    def open(self, sequences: Sequences, requests: Sequence[EngineRequest]) -> None:
        """Submit a request's sequences, one engine request each; from here on its responses, errors too, come from
        the sender threads."""
        assert len(requests) == len(sequences.streams) <= MAX_SEQUENCES
        self.check_accepting()
        number = next(self._numbers)
        self._open[number] = sequences  # before submit: its tokens may come at once
        for index, request in enumerate(requests):
            ticket = ticket_of(number, index)
            try:
                self._engine.submit(ticket, request)
            except MstarError as error:
                self._pool.put(Failure(number, error.code, str(error), ticket))
                break
        if self._refusal is not None:  # lost or draining since the check: it may have missed this number
            self._abandon(number, sequences)
            self._pool.put(Failure(number, ErrorCode.UNAVAILABLE, self._refusal))
        elif sequences.is_abandoned:  # while they were submitted: the engine may have heard of the end first
            self._abandon(number, sequences)

    # The client's receive thread calls these four.
    def on_tokens(self, rows: TokenRows) -> None:
        self._pool.put_tokens(rows)

    def on_prompt_logprobs(self, ticket: int, records: np.ndarray) -> None:
        number, _ = split_ticket(ticket)
        self._pool.put(Prompt(number, records))

    def on_failed(self, ticket: int, code: ErrorCode, message: str) -> None:
        number, _ = split_ticket(ticket)
        self._pool.put(Failure(number, code, message, ticket))

    def on_engine_lost(self, message: str) -> None:
        self._refusal = f"the engine is gone: {message}"
        self._fail_all(ErrorCode.INTERNAL, f"the engine is gone: {message}")

    def drain(self) -> None:
        """Take no more requests; let the open ones end, for at most ``drain_timeout_s``, then end the rest."""
        self._refusal = self._refusal or DRAINING
        if not self._wait_until_idle(self._drain_timeout_s):
            self._fail_all(ErrorCode.UNAVAILABLE, DRAINING)

    def close(self) -> None:
        """Stop the threads; call ``drain`` first, or open requests never end."""
        self._cancels.stop()
        self._pool.close()

    def _wait_until_idle(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._open

    def _fail_all(self, code: ErrorCode, message: str) -> None:
        for number, sequences in list(self._open.items()):
            self._abandon(number, sequences)
            self._pool.put(Failure(number, code, message))

    def _abandon(self, number: int, sequences: Sequences, but: int | None = None) -> None:
        """Tell the engine to drop what still runs of a request; ``but`` has ended there."""
        sequences.is_abandoned = True
        for ticket in sequences.running(number):
            if ticket != but:
                self._engine.cancel(ticket)

    # Sender threads.
    def handle_tokens(self, rows: TicketRows) -> None:
        ticket = rows.ticket
        number, index = split_ticket(ticket)
        sequences = self._open.get(number)
        if sequences is None or sequences.has_ended(index):
            return  # rows the engine made before it heard that the sequence had ended
        if rows.finish == FinishReason.CANCELLED:
            self.handle_failure(Failure(number, ErrorCode.CANCELLED, "the request was cancelled", ticket))
            return
        try:
            responses = sequences.take(index, rows.tokens, rows.finish, rows.logprobs)
            stream = sequences.streams[index]
            if stream.matched_stop and not rows.finish:
                self._engine.finish(ticket, stream.num_tokens)
            self._send(number, sequences, responses)
        except Exception as error:
            self._fail_response(number, sequences, error)

    def handle_prompt(self, prompt: Prompt) -> None:
        sequences = self._open.get(prompt.number)
        if sequences is not None:
            sequences.tell_prompt(prompt.records)

    def handle_failure(self, failure: Failure) -> None:
        sequences = self._open.get(failure.number)
        if sequences is None:
            return
        if failure.ticket is not None:
            _, index = split_ticket(failure.ticket)
            if sequences.has_ended(index):
                return  # at a stop string that the engine had not heard of
            if is_late(failure.code, failure.message) and self._handle_late(failure.number, sequences, index):
                return
        del self._open[failure.number]
        if not sequences.is_abandoned:  # one sequence failed: the others have nobody to answer
            self._abandon(failure.number, sequences, but=failure.ticket)
        sequences.reply.fail(failure.code, failure.message)

    def _handle_late(self, number: int, sequences: Sequences, index: int) -> bool:
        """Whether the request goes on, or ends well, without a sequence whose time was over before it ran."""
        try:
            responses = sequences.take_late(index)
            if responses is not None:
                self._send(number, sequences, responses)
        except Exception as error:
            self._fail_response(number, sequences, error)
            return True
        return responses is not None

    def _send(self, number: int, sequences: Sequences, responses: Sequence[Sequence[Chunk]]) -> None:
        if sequences.is_over:
            del self._open[number]
        for count, chunks in enumerate(responses, 1):
            sequences.reply.send(chunks, final=sequences.is_over and count == len(responses))

    def _fail_response(self, number: int, sequences: Sequences, error: Exception) -> None:
        logger.exception("request %r: a response failed", sequences.request_id)
        self._open.pop(number, None)
        self._abandon(number, sequences)
        sequences.reply.fail(ErrorCode.INTERNAL, f"the response failed: {error}")

    # The cancel poll's thread.
    def _on_cancel(self, number: int, sequences: Sequences) -> None:
        self._abandon(number, sequences)
        self._pool.put(Failure(number, ErrorCode.CANCELLED, "the client cancelled the request"))
