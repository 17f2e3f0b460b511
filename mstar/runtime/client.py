"""A front end's side of an engine process: finds or starts it, sends requests, hands on what comes back."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import threading
import time
from typing import Protocol

import numpy as np
import zmq

from mstar.conductor.queue import num_waiting, queue_full
from mstar.runtime import messages
from mstar.runtime.board import Board, Slot, StaleCheck
from mstar.runtime.launch import load_failure, start_engine
from mstar.runtime.messages import (
    Beat,
    Bye,
    Cancel,
    EngineRequest,
    Failed,
    Finish,
    Hello,
    PromptTokens,
    StepTokens,
    Submit,
    TokenRows,
    Welcome,
)
from mstar.runtime.options import EngineOptions
from mstar.runtime.presence import EngineFolder, EngineRecord, open_engine_folder
from mstar.runtime.processes import ExitWatch
from mstar.utils.errors import ErrorCode, LoadError, Unavailable

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # between two looks at the engine's process and beat
BEAT_INTERVAL_S = 1.0
BEAT_STALE_S = 5.0
LEAVING_WAIT_S = 30.0  # for an engine that signed off and still frees its memory

_numbers = itertools.count()


class EngineListener(Protocol):
    """What an engine has to say; called on the client's one receive thread, so every call must be short."""

    def on_tokens(self, rows: TokenRows) -> None:
        """Rows of one step; the arrays are read only."""

    def on_prompt_logprobs(self, ticket: int, records: np.ndarray) -> None:
        """What was asked about a request's prompt, before its first row: LOGPROB [prompt tokens - 1], read only."""

    def on_failed(self, ticket: int, code: ErrorCode, message: str) -> None:
        """A request ended with an error."""

    def on_engine_lost(self, message: str) -> None:
        """The engine is gone, and with it every open request.  Called at most once; nothing follows."""


class EngineClient:
    """One front end of one engine.  All methods but ``start`` and ``close`` may be called from any thread.

    Args:
        server_pid: the process whose engines these are; an engine never outlives it.
        engine_name: entries of one server that give one name (and equal options) share the engine.
        load_timeout_s: longest wait of ``start``.
    """

    def __init__(
        self, server_pid: int, engine_name: str, options: EngineOptions, *, load_timeout_s: float = 1800.0
    ) -> None:
        self._server_pid = server_pid
        self._engine_name = engine_name
        self._options = options
        self._load_timeout_s = load_timeout_s
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._send_lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: EngineFolder | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lost: str | None = "the engine has not been started"

    def start(self, listener: EngineListener) -> None:
        """Attaches to the engine, starting it if nobody did, and waits until its model is loaded.

        Raises:
            LoadError: the engine's own words when it cannot load, or that it took too long.
        """
        self._listener = listener
        self._folder = open_engine_folder(self._server_pid, self._engine_name, self._options.key())
        deadline = time.monotonic() + self._load_timeout_s
        with self._folder.locked():
            record = self._folder.engine()
            if record is not None and record.has_signed_off:
                _wait_for_end(record)
            if record is None or not record.is_alive():
                record, self._child = start_engine(self._folder, self._engine_name, self._options, self._server_pid)
            self._folder.sign_on(self._name)  # still locked: an engine about to leave sees it and stays
        self._record = record
        self._watch = ExitWatch(record.pid, record.started)
        try:
            self._connect()
            self._info = self._wait_for_welcome(deadline)
            self._board = Board.open(self._folder.board_path)
        except BaseException:
            self.close()
            raise
        self._lost = None
        self._thread = threading.Thread(target=self._receive, name="mstar-engine-client", daemon=True)
        self._thread.start()

    @property
    def info(self) -> Welcome:
        """The engine's model and limits; there once ``start`` returned."""
        return self._info

    @property
    def board(self) -> Board:
        """The engine's counters, read without asking it."""
        return self._board

    @property
    def engine(self) -> EngineRecord:
        """The engine's process."""
        return self._record

    def is_alive(self) -> bool:
        """False before ``start``, once the engine is lost, and after ``close``."""
        return self._lost is None

    def submit(self, ticket: int, request: EngineRequest) -> None:
        """Hands over a request under a ticket never used before.

        Raises:
            Unavailable: the engine is gone, draining, or visibly full.  It may still answer so later.
        """
        if self._lost is not None:
            raise Unavailable(self._lost)
        if self._board.is_draining:
            raise Unavailable("the engine is draining")
        # A request for no tokens never waits; the server answers one at load, which must not fail on a busy engine.
        if request.max_tokens != 0 and self._is_visibly_full():
            raise Unavailable(queue_full(self._info.max_queued_requests))
        self._send(Submit(ticket, request))

    def cancel(self, ticket: int) -> None:
        """Ends a request with finish ``CANCELLED``; no effect on one that has ended."""
        self._send(Cancel(ticket))

    def finish(self, ticket: int, kept_tokens: int) -> None:
        """Ends a request whose text ended after ``kept_tokens`` tokens; nothing more is reported of it."""
        self._send(Finish(ticket, kept_tokens))

    def close(self, wait_s: float = 0.0) -> None:
        """Signs off; the engine drops what this front end still runs.  Idempotent.

        Args:
            wait_s: wait so long for the engine to end if this was its last front end.
        """
        if self._context is not None:
            self._send(Bye())
            self._lost = "the engine client is closed"
            self._closing = True
            if self._thread is not None:
                self._thread.join()
            with self._send_lock:
                self._tx.close(linger=500)
            self._rx.close(linger=0)
            self._context.term()
            self._context = None
            self._watch.close()
        if self._folder is not None:
            self._folder.sign_off(self._name)
            if wait_s and not self._folder.has_living_fronts():
                _wait_for_end(self._record, wait_s)
        if self._child is not None:
            self._child.poll()  # reaps it if it ended

    def _is_visibly_full(self) -> bool:
        """Whether as many wait as may, also if all of them come to the rows that are free."""
        queued = self._board.queued
        num_free_rows = max(self._info.max_running_requests - self._board.running, 0)
        # What the board says may be a step old: where nobody may wait, the engine itself refuses.
        return num_waiting(queued, queued, num_free_rows) >= max(self._info.max_queued_requests, 1)

    def _connect(self) -> None:
        assert self._folder is not None
        self._context = zmq.Context()
        # Two sockets, since one must not be used by two threads: _rx belongs to the receive thread, _tx to
        # whoever holds the lock.
        self._tx = self._socket(b"/t")
        self._rx = self._socket(b"/r")
        self._rx.send(messages.encode(Hello(os.getpid(), self._name)))

    def _socket(self, suffix: bytes) -> zmq.Socket[bytes]:
        assert self._folder is not None
        assert self._context is not None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._name.encode() + suffix)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(self._folder.socket_address)
        return socket

    def _send(self, message: messages.ToEngine) -> None:
        if self._lost is not None:
            return
        with self._send_lock:
            if not self._tx.closed:
                self._tx.send(messages.encode(message))

    def _wait_for_welcome(self, deadline: float) -> Welcome:
        assert self._folder is not None
        while not self._rx.poll(100):
            if self._watch.has_ended():
                raise LoadError(load_failure(self._folder))
            if time.monotonic() > deadline:
                raise LoadError(f"load_timeout_s: the engine did not load within {self._load_timeout_s:g} s")
        welcome = messages.decode_from_engine(self._rx.recv())
        assert isinstance(welcome, Welcome)
        return welcome

    # The receive thread.
    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._rx, zmq.POLLIN)
        if self._watch.fd is not None:
            poller.register(self._watch.fd, zmq.POLLIN)
        stale = StaleCheck(BEAT_STALE_S)
        next_look = next_beat = 0.0
        while not self._closing:
            events = dict(poller.poll(int(LOOK_INTERVAL_S * 1000)))
            has_ended = self._watch.fd in events
            self._drain()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_INTERVAL_S
                has_ended = has_ended or self._watch.has_ended()
                if stale.is_stale(self._board[Slot.BEAT_NS]):
                    return self._lose(f"the engine process has not answered for {BEAT_STALE_S:g} s")
            if has_ended:
                self._drain()
                return self._lose(f"the engine process (pid {self._record.pid}) ended")
            if now >= next_beat:
                next_beat = now + BEAT_INTERVAL_S
                self._rx.send(messages.encode(Beat()))
        return None

    def _drain(self) -> None:
        while not self._closing:
            try:
                frame = self._rx.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(frame)
            except Exception:  # a listener's defect must not end the thread that all its requests depend on
                log.exception("a message of the engine could not be handled")

    def _dispatch(self, frame: bytes) -> None:
        message = messages.decode_from_engine(frame)
        if isinstance(message, StepTokens):
            self._listener.on_tokens(message.rows())
        elif isinstance(message, PromptTokens):
            self._listener.on_prompt_logprobs(message.ticket, message.records())
        elif isinstance(message, Failed):
            self._listener.on_failed(message.ticket, ErrorCode(message.code), message.message)

    def _lose(self, message: str) -> None:
        level = logging.INFO if self._board.is_draining else logging.ERROR
        log.log(level, "%s", message)
        self._lost = message
        try:
            self._listener.on_engine_lost(message)
        except Exception:
            log.exception("on_engine_lost failed")


def _wait_for_end(record: EngineRecord, timeout_s: float = LEAVING_WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while record.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
