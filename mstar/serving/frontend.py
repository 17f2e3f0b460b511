"""One stub's front end: open requests between the engine's tokens and the clients' responses. Knows no Triton."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import Protocol

import numpy as np

from mstar.runtime.messages import EngineRequest, FinishReason
from mstar.serving.responses import Stream
from mstar.serving.senders import Failure, SenderPool, Tokens
from mstar.utils.errors import ErrorCode, MstarError, Unavailable

logger = logging.getLogger(__name__)

CANCEL_POLL_S = 0.05  # is_cancelled() is a round trip until it is true: one loop asks for all
DRAINING = "the server is shutting down"


class Engine(Protocol):
    """What a front end needs of ``mstar.runtime.client.EngineClient``."""

    def submit(self, ticket: int, request: EngineRequest) -> None: ...

    def cancel(self, ticket: int) -> None: ...

    def finish(self, ticket: int, kept_tokens: int) -> None: ...

    def is_alive(self) -> bool: ...


class Frontend:
    """The listener of an engine client, and the owner of the open requests.

    ``_open`` maps tickets to streams. ``open`` adds; only a stream's sender thread removes, and whoever removes it
    sends its last response: so there is exactly one, whatever races (tokens, cancel, loss of the engine, drain).
    """

    def __init__(self, engine: Engine, *, num_senders: int = 4, drain_timeout_s: float = 20.0) -> None:
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._open: dict[int, Stream] = {}
        self._tickets = itertools.count(1)
        self._refusal: str | None = None  # why new requests are turned away
        self._pool = SenderPool(self._send_tokens, self._send_failure, num_senders)
        self._stop = threading.Event()
        self._cancel_loop = threading.Thread(target=self._poll_cancels, name="mstar-cancel", daemon=True)
        self._cancel_loop.start()

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

    def open(self, stream: Stream, request: EngineRequest) -> None:
        """Submit a request; from here on its responses, errors too, come from the sender threads."""
        self.check_accepting()
        ticket = next(self._tickets)
        self._open[ticket] = stream  # before submit: its tokens may come at once
        try:
            self._engine.submit(ticket, request)
        except MstarError as error:
            self._pool.put_failure(Failure(ticket, error.code, str(error)))
        if self._refusal is not None:  # lost or draining since the check: it may have missed this ticket
            self._engine.cancel(ticket)
            self._pool.put_failure(Failure(ticket, ErrorCode.UNAVAILABLE, self._refusal))

    # The client's receive thread calls these three.
    def on_tokens(self, tickets: np.ndarray, tokens: np.ndarray, finish: np.ndarray) -> None:
        self._pool.put_tokens(Tokens(tickets, tokens, finish))

    def on_failed(self, ticket: int, code: ErrorCode, message: str) -> None:
        self._pool.put_failure(Failure(ticket, code, message))

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
        self._stop.set()
        self._cancel_loop.join()
        self._pool.close()

    def _wait_until_idle(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._open

    def _fail_all(self, code: ErrorCode, message: str) -> None:
        for ticket in list(self._open):
            self._engine.cancel(ticket)
            self._pool.put_failure(Failure(ticket, code, message))

    # Sender threads.
    def _send_tokens(self, ticket: int, tokens: np.ndarray, finish: int) -> None:
        stream = self._open.get(ticket)
        if stream is None:
            return  # rows the engine made before it heard that the request had ended
        if finish == FinishReason.CANCELLED:
            self._send_failure(Failure(ticket, ErrorCode.CANCELLED, "the request was cancelled"))
            return
        try:
            chunk = stream.take(tokens, finish)
            if chunk is None:
                return
            if stream.matched_stop and not finish:
                self._engine.finish(ticket, stream.num_tokens)
            is_last = chunk.finish_reason is not None
            if is_last:
                del self._open[ticket]
            stream.reply.send(chunk, final=is_last)
        except Exception as error:
            logger.exception("request %r: a response failed", stream.request_id)
            self._open.pop(ticket, None)
            self._engine.cancel(ticket)
            stream.reply.fail(ErrorCode.INTERNAL, f"the response failed: {error}")

    def _send_failure(self, failure: Failure) -> None:
        stream = self._open.pop(failure.ticket, None)
        if stream is not None:
            stream.reply.fail(failure.code, failure.message)

    # Cancel loop.
    def _poll_cancels(self) -> None:
        while not self._stop.wait(CANCEL_POLL_S):
            self._cancel_asked()  # a call, so that no local keeps the last stream, and with it its sender, alive

    def _cancel_asked(self) -> None:
        for ticket, stream in list(self._open.items()):
            if not stream.is_cancelled and self._asks_cancel(stream):
                stream.is_cancelled = True
                self._engine.cancel(ticket)
                self._pool.put_failure(Failure(ticket, ErrorCode.CANCELLED, "the client cancelled the request"))

    def _asks_cancel(self, stream: Stream) -> bool:
        try:
            return stream.reply.is_cancelled()
        except Exception:  # a server that cannot say: the request goes on
            logger.exception("request %r: cancellation could not be read", stream.request_id)
            return False
