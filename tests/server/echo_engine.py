"""A stand-in engine for the real server: it generates its prompt's own tokens, one per step.

So a test knows the right text of any request, whatever the script, at the speed of the response path.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

import mstar.serving.backend
from mstar.runtime.client import EngineListener
from mstar.runtime.messages import NO_TOKEN, EngineRequest, FinishReason, Welcome
from mstar.runtime.options import EngineOptions
from mstar.serving.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]

STEP_S = 0.002


@dataclass
class Row:
    ids: list[int]
    max_tokens: int
    num_done: int = 0

    def next(self) -> tuple[int, FinishReason]:
        if self.max_tokens == 0:
            return NO_TOKEN, FinishReason.LENGTH
        if self.num_done == len(self.ids):
            return NO_TOKEN, FinishReason.STOP
        token = self.ids[self.num_done]
        self.num_done += 1
        return token, FinishReason.LENGTH if self.num_done == self.max_tokens else FinishReason.RUNNING


class EchoClient:
    """The interface of ``EngineClient``."""

    info = Welcome("echo", 49152, 8192, 64, 64, 0, 0, 0, "cpu", "float32", 0.0)

    def __init__(self, server_pid: int, engine_name: str, options: EngineOptions, *, load_timeout_s: float) -> None:
        self._rows: dict[int, Row] = {}
        self._stop = threading.Event()

    def start(self, listener: EngineListener) -> None:
        self._listener = listener
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, ticket: int, request: EngineRequest) -> None:
        self._rows[ticket] = Row(request.prompt_array().tolist(), request.max_tokens)

    def cancel(self, ticket: int) -> None:
        self._rows.pop(ticket, None)

    def finish(self, ticket: int, kept_tokens: int) -> None:
        self._rows.pop(ticket, None)

    def is_alive(self) -> bool:
        return not self._stop.is_set()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(STEP_S):
            rows = [(ticket, *row.next()) for ticket, row in list(self._rows.items())]
            if not rows:
                continue
            for ticket, _, finish in rows:
                if finish:
                    self._rows.pop(ticket, None)
            tickets, tokens, finishes = zip(*rows, strict=True)
            self._listener.on_tokens(
                np.array(tickets, np.int64), np.array(tokens, np.int32), np.array(finishes, np.uint8)
            )


mstar.serving.backend.EngineClient = EchoClient
