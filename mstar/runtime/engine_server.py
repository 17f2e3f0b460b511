"""The engine's loop: messages in, steps, messages out, and when to leave."""

from __future__ import annotations

import logging
import math
import select
import time
from collections import OrderedDict

import torch
import zmq

from mstar.conductor.report import StepReport
from mstar.conductor.request import FinishReason
from mstar.runtime import exit_codes, messages
from mstar.runtime.board import Board, EngineState, Slot
from mstar.runtime.core import MESSAGES_PER_STEP, EngineCore
from mstar.runtime.fronts import Front, Fronts
from mstar.runtime.messages import Beat, Bye, Cancel, Failed, Finish, Hello, PromptTokens, Submit
from mstar.runtime.outgoing import by_client
from mstar.runtime.presence import EngineFolder
from mstar.runtime.processes import ExitWatch, children_seconds, own_seconds
from mstar.runtime.watchdog import Watchdog
from mstar.utils.errors import EngineFault, ErrorCode, MstarError, Unavailable

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.05  # between two looks at the processes around
PRESENCE_INTERVAL_S = 1.0  # between two looks into the folder
IDLE_WAIT_MS = 50
READS_PER_STEP = 512  # messages between two steps, some 5 ms
SHARE = 0.1  # of the last step's time, to read and let in more than that and MESSAGES_PER_STEP
LEAVE_AFTER_S = 1.0  # without front ends
FIRST_FRONT_S = 60.0  # from the start to the first one


class EngineServer:
    """Runs one core for the front ends of one server.  Single threaded but for the watchdog.

    Requests that have come are let in a few per step, so that a flood of them does not stop the rows that run, and
    more where a step takes so long that they would wait; what is said of earlier ones, such as a cancel, does not wait
    behind them.

    Args:
        socket: a ROUTER, bound before the model was loaded; what came meanwhile waits in it.
        server: the process that the engine must not outlive.
    """

    def __init__(
        self, core: EngineCore, folder: EngineFolder, socket: zmq.Socket[bytes], server: ExitWatch, board: Board
    ) -> None:
        self._core = core
        self._folder = folder
        self._socket = socket
        self._server = server
        self._board = board
        self._fronts = Fronts(folder)
        # A long prompt that is not split has a step of its own, which takes that much longer.
        is_split = core.options.chunked_prefill
        longest = 1.0 if is_split else max(1.0, core.info.max_seq_len / core.options.max_batch_tokens)
        worked = own_seconds if core.engine.device.type == "cpu" else children_seconds
        self._watchdog = Watchdog(board, core.options.step_timeout_s * longest, worked)
        self._arrivals: OrderedDict[tuple[str, int], Submit] = OrderedDict()  # by front end and ticket, oldest first
        self._next_look = self._next_presence = 0.0
        self._alone_since = time.monotonic() + FIRST_FRONT_S - LEAVE_AFTER_S
        self._drain_until: float | None = None
        self._step_s = 0.0  # that the last step took

    def drain(self, timeout_s: float) -> None:
        """Takes no more requests; :meth:`run` returns when the accepted ones have ended, or after ``timeout_s``."""
        if self._drain_until is None:
            log.warning("draining: %d requests run, %d wait", *self._load())
            self._drain_until = time.monotonic() + timeout_s
            self._core.conductor.drain()
            self._board[Slot.STATE] = EngineState.DRAINING

    @torch.inference_mode()  # here, since each step would pay for entering it
    def run(self) -> int:
        """Serves until no front end is left, the server is gone, it has drained, or the device has failed; the exit
        code of the process."""
        self._watchdog.start()
        self._board[Slot.STATE] = EngineState.READY
        try:
            while True:
                # Before the look around: the beats that came during a long step have to count.
                self._receive(0 if self._has_work() else IDLE_WAIT_MS)
                if self._is_over():
                    return 0
                if self._core.has_work():
                    self._step()
                    if self._core.engine.device_failure is not None:
                        self._end_rest(EngineFault(f"the device has failed: {self._core.engine.device_failure}"))
                        return exit_codes.DEVICE_FAILED
                self._publish_counters()
        finally:
            self._board[Slot.STATE] = EngineState.EXITED
            self._watchdog.stop()

    def _has_work(self) -> bool:
        return bool(self._arrivals) or self._core.has_work()

    def _step(self) -> None:
        self._watchdog.begins()
        began = time.monotonic()
        report = self._core.step()
        self._step_s = time.monotonic() - began
        self._watchdog.ends()
        self._tell(report)
        if report.is_empty and not report.num_stepped:
            time.sleep(0.001)  # nothing could run: the cores are for those who will free or prepare something

    # Messages out.

    def _tell(self, report: StepReport) -> None:
        for prompt in report.prompt_logprobs:
            front = self._fronts.by_number(prompt.client)
            if front is not None:
                self._send(front, PromptTokens(prompt.ticket, prompt.logprobs.tobytes()))
        for client, ended, message in by_client(report):
            front = self._fronts.by_number(client)
            if front is not None:
                for ticket in ended:
                    front.tickets.pop(ticket, None)
                self._send(front, message)
        for failure in report.failures:
            self._send_failure(failure.client, failure.ticket, failure.code, failure.message)

    def _send_failure(self, number: int, ticket: int, code: ErrorCode, message: str) -> None:
        front = self._fronts.by_number(number)
        if front is not None:
            front.tickets.pop(ticket, None)
            self._send(front, Failed(ticket, code.value, message))

    def _send(self, front: Front, message: messages.FromEngine) -> None:
        try:
            self._socket.send_multipart([front.address, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it vanished: the next look at its process drops it
            log.warning("front end %s cannot be reached: %s", front.name, error)

    # Messages in.

    def _receive(self, wait_ms: int) -> None:
        if wait_ms and not self._socket.poll(wait_ms):
            return
        self._watchdog.begins()
        until, reads = time.monotonic() + SHARE * self._step_s, 0
        while reads < READS_PER_STEP or time.monotonic() < until:
            reads += 1
            try:
                address, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._handle(address, messages.decode_to_engine(frame))
            except Exception:
                log.exception("a message from %r could not be handled", address)
        self._let_in(MESSAGES_PER_STEP, until)
        self._watchdog.ends()

    def _handle(self, address: bytes, message: messages.ToEngine) -> None:
        name = address[:-2].decode()
        front = self._fronts.by_name(name)
        match message:
            case Hello():
                front = front or self._fronts.add(message, address)
                log.info("front end %s (pid %d) is there", name, message.pid)
                self._send(front, self._core.info)
            case Submit():
                self._arrivals[name, message.ticket] = message
            case Cancel() | Finish() if front is not None:
                arrival = self._arrivals.pop((name, message.ticket), None)
                if arrival is not None:
                    self._submit(front, arrival)
                if (request_id := front.tickets.get(message.ticket)) is None:
                    return
                if isinstance(message, Cancel):
                    self._core.cancel(request_id)
                else:
                    del front.tickets[message.ticket]
                    self._core.finish(request_id, message.kept_tokens)
            case Beat() if front is not None:
                self._fronts.beat(front)
            case Bye() if front is not None:
                self._drop(front, "signed off")

    def _let_in(self, most: float, until: float = 0.0) -> None:
        """Submits the oldest arrivals until ``most`` of them were accepted, and more up to time ``until``."""
        while self._arrivals and (most > 0 or time.monotonic() < until):
            (name, _), arrival = self._arrivals.popitem(last=False)
            front = self._fronts.by_name(name)
            if front is not None:
                most -= self._submit(front, arrival)

    def _submit(self, front: Front, message: Submit) -> bool:
        """Whether the request was accepted."""
        try:
            request_id = self._core.submit(message.request, front.number, message.ticket)
        except Exception as error:
            code = error.code if isinstance(error, MstarError) else ErrorCode.INTERNAL
            if code is ErrorCode.INTERNAL:
                log.exception("a request of %s could not be submitted", front.name)
            self._send(front, Failed(message.ticket, code.value, str(error)))
            return False
        front.tickets[message.ticket] = request_id
        return True

    # Who is around.

    def _is_over(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_INTERVAL_S
        if self._server.has_ended():
            log.warning("the server (pid %d) is gone", self._server.pid)
            return True
        self._drop_dead(now)
        if self._drain_until is not None and (now > self._drain_until or not self._has_work()):
            self._end_rest(Unavailable("the engine is shutting down"))
            return True
        if len(self._fronts):
            self._alone_since = now
        return now - self._alone_since > LEAVE_AFTER_S and self._sign_off()

    def _drop_dead(self, now: float) -> None:
        dead = {front.watch.fd: front for front in self._fronts if front.watch.fd is not None}
        if dead:
            poll = select.poll()
            for fd in dead:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(0):
                self._drop(dead[fd], "died")
        if now >= self._next_presence:
            self._next_presence = now + PRESENCE_INTERVAL_S
            for front in self._fronts.gone():
                self._drop(front, "is gone")
            for front in self._fronts.newly_hung():
                log.warning("front end %s sends no beat: its requests are dropped", front.name)
                self._cancel_all(front)

    def _drop(self, front: Front, why: str) -> None:
        log.info("front end %s %s, %d open requests are dropped", front.name, why, len(front.tickets))
        self._cancel_all(front)
        self._fronts.remove(front)
        self._alone_since = time.monotonic()

    def _cancel_all(self, front: Front) -> None:
        self._let_in(math.inf)  # its own among them are told then, too
        for request_id in list(front.tickets.values()):
            self._core.cancel(request_id)

    def _sign_off(self) -> bool:
        """Leaves unless somebody arrives: a front end signs on under the same lock."""
        with self._folder.locked():
            record = self._folder.engine()
            if self._folder.has_living_fronts() or record is None:
                return False
            self._folder.write_engine(record.signed_off())
        log.info("no front end is left")
        return True

    def _end_rest(self, error: MstarError) -> None:
        """Tells everybody who still waits for something of this error."""
        self._core.conductor.drain()
        self._let_in(math.inf)  # that is, refuses
        self._core.conductor.fail_all(error)
        self._tell(self._core.step())

    def _load(self) -> tuple[int, int]:
        return self._core.conductor.num_running, self._core.conductor.num_queued

    def _publish_counters(self) -> None:
        conductor, board = self._core.conductor, self._board
        counters = conductor.counters
        board[Slot.RUNNING], board[Slot.QUEUED] = self._load()
        board[Slot.QUEUED_TOKENS] = conductor.num_queued_tokens
        board[Slot.STEPS] = self._core.engine.steps.total()
        board[Slot.KV_PAGES_USED] = conductor.pools.num_pages_used
        board[Slot.KV_PAGES_TOTAL] = conductor.pools.num_pages
        board[Slot.PROMPT_TOKENS] = counters.prompt_tokens
        board[Slot.GENERATED_TOKENS] = counters.generated_tokens
        board[Slot.OVERSHOOT_TOKENS] = counters.overshoot_tokens
        board[Slot.DISCARDED_TOKENS] = counters.discarded_tokens
        board[Slot.CACHED_PROMPT_TOKENS] = counters.cached_prompt_tokens
        board[Slot.ROW_FAULTS] = counters.row_faults
        board[Slot.CONSTRAINT_FAULTS] = counters.constraint_faults
        board[Slot.FINISHED_STOP] = counters.finished[FinishReason.STOP]
        board[Slot.FINISHED_LENGTH] = counters.finished[FinishReason.LENGTH]
        board[Slot.FINISHED_CANCELLED] = counters.finished[FinishReason.CANCELLED]
        board[Slot.FINISHED_TIMEOUT] = counters.finished[FinishReason.TIMEOUT]
        board[Slot.EXPIRED] = counters.expired
        board[Slot.FAILED] = counters.failed
        board[Slot.REFUSED] = counters.refused.total()
