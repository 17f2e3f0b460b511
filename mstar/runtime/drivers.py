"""Two places for an engine of one's own, behind one interface: this process, or a child."""

from __future__ import annotations

import itertools
import os
import queue
import sys
import time
from typing import Protocol

import numpy as np

from mstar.conductor.report import Failure, PromptLogprobs, StepReport, empty_report
from mstar.conductor.request import EngineRequest
from mstar.runtime.client import EngineClient
from mstar.runtime.launch import thread_waiting
from mstar.runtime.messages import TokenRows, Welcome
from mstar.runtime.options import EngineOptions, FrontOptions
from mstar.utils.errors import EngineFault, ErrorCode

IDLE_WAIT_S = 0.001  # after a step that did nothing


class Driver(Protocol):
    """Runs requests.  One thread uses it."""

    @property
    def info(self) -> Welcome: ...

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidArgument for what the engine would refuse, as far as this side can know; runs nothing."""

    def submit(self, request: EngineRequest) -> int:
        """Accepts a request; returns the ticket that reports name it by.  Raises as the conductor does."""

    def cancel(self, ticket: int) -> None: ...

    def finish(self, ticket: int, kept_tokens: int) -> None: ...

    def poll(self) -> StepReport:
        """What happened next; waits for it.  Call it only while a request is open.

        Raises:
            EngineFault: the engine is gone.
        """

    def close(self) -> None: ...


class InProcess:
    """An engine in this process: :meth:`poll` runs a step.

    Unless torch is loaded already, its compute threads wait as an engine process's do.
    """

    def __init__(self, options: EngineOptions) -> None:
        if "torch" not in sys.modules:
            os.environ.update(thread_waiting())
        from mstar.runtime.core import EngineCore  # here, because a child's parent needs no torch

        self.core = EngineCore(options)
        self.info = self.core.info
        self.check = self.core.check
        self.submit = self.core.submit
        self.cancel = self.core.cancel
        self.finish = self.core.finish

    def poll(self) -> StepReport:
        report = self.core.step()
        if self.core.engine.device_failure is not None:
            raise EngineFault(f"the device has failed: {self.core.engine.device_failure}")
        if report.is_empty and not report.num_stepped:
            time.sleep(IDLE_WAIT_S)  # what is waited for needs the cores: a grammar to compile
        return report

    def close(self) -> None:
        """Frees the engine with this object."""


class InChild:
    """An engine in a child process, which ends with this one."""

    def __init__(self, name: str, options: EngineOptions, front_options: FrontOptions) -> None:
        self._tickets = itertools.count()
        self._events: queue.SimpleQueue[StepReport | EngineFault] = queue.SimpleQueue()
        self.client = EngineClient(os.getpid(), name, options, load_timeout_s=front_options.load_timeout_s)
        self.client.start(self)
        self.info = self.client.info

    def check(self, request: EngineRequest) -> None:
        """The engine's own word comes when a request is run."""

    def submit(self, request: EngineRequest) -> int:
        ticket = next(self._tickets)
        self.client.submit(ticket, request)
        return ticket

    def cancel(self, ticket: int) -> None:
        self.client.cancel(ticket)

    def finish(self, ticket: int, kept_tokens: int) -> None:
        self.client.finish(ticket, kept_tokens)

    def poll(self) -> StepReport:
        event = self._events.get()
        if isinstance(event, EngineFault):
            self._events.put(event)  # whoever asks again learns it too
            raise event
        return event

    def close(self) -> None:
        self.client.close(wait_s=10.0)

    # The client's receive thread.
    def on_tokens(self, rows: TokenRows) -> None:
        tickets = rows.tickets
        report = StepReport(
            tickets,
            np.zeros_like(tickets),
            tickets,
            rows.tokens,
            rows.finish,
            num_stepped=tickets.size,
            logprob_rows=rows.logprob_rows,
            logprobs=rows.logprobs,
        )
        self._events.put(report)

    def on_prompt_logprobs(self, ticket: int, records: np.ndarray) -> None:
        self._events.put(empty_report(prompt_logprobs=[PromptLogprobs(0, ticket, records)]))

    def on_failed(self, ticket: int, code: ErrorCode, message: str) -> None:
        self._events.put(empty_report(failures=[Failure(ticket, 0, ticket, code, message)]))

    def on_engine_lost(self, message: str) -> None:
        self._events.put(EngineFault(message))
