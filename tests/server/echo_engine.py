"""A stand-in engine for the real server: it generates its prompt's own tokens, one per step.

So a test knows the right text of any request, whatever the script, at the speed of the response path. Stop ids and
deadlines are kept; the token at place i has log-probability -(i + 1) / 8, rank i + 1, and is its own most likely token.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

import mstar.serving.backend
from mstar.conductor.request import LOGPROB, stop_code, stop_id_of
from mstar.runtime.client import EngineListener
from mstar.runtime.messages import NO_TOKEN, EngineRequest, FinishReason, TokenRows, Welcome
from mstar.runtime.options import EngineOptions
from mstar.serving.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]

STEP_S = 0.002


def told(places: list[int], ids: list[int]) -> np.ndarray:
    """LOGPROB records of the tokens ``ids`` at ``places``."""
    records = np.zeros(len(ids), LOGPROB)
    records["logprob"] = -(np.array(places) + 1) / 8
    records["rank"] = np.array(places) + 1
    records["top_ids"] = -1
    records["top_ids"][:, 0] = ids
    records["top_logprobs"][:, 0] = records["logprob"]
    return records


@dataclass
class Row:
    request: EngineRequest
    ids: list[int]
    num_done: int = 0

    @property
    def is_told(self) -> bool:
        return self.request.num_logprobs >= 0

    def next(self) -> tuple[int, FinishReason]:
        if 0 < self.request.deadline_ns <= time.monotonic_ns():
            return NO_TOKEN, FinishReason.TIMEOUT
        if self.request.max_tokens == 0:
            return NO_TOKEN, FinishReason.LENGTH
        if self.num_done == len(self.ids):
            return NO_TOKEN, FinishReason.STOP
        token = self.ids[self.num_done]
        if token in self.request.stop_ids and self.num_done >= self.request.min_tokens:
            return stop_code(token), FinishReason.STOP
        self.num_done += 1
        return token, FinishReason.LENGTH if self.num_done == self.request.max_tokens else FinishReason.RUNNING


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
        ids = request.prompt_array().tolist()
        if request.num_prompt_logprobs >= 0:
            self._listener.on_prompt_logprobs(ticket, told(list(range(1, len(ids))), ids[1:]))
        self._rows[ticket] = Row(request, ids)

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
            rows = [(ticket, row, row.num_done, *row.next()) for ticket, row in list(self._rows.items())]
            if not rows:
                continue
            for ticket, *_, finish in rows:
                if finish:
                    self._rows.pop(ticket, None)
            tickets, _, _, tokens, finishes = zip(*rows, strict=True)
            step = TokenRows(np.array(tickets, np.int64), np.array(tokens, np.int32), np.array(finishes, np.uint8))
            where = [index for index, (_, row, _, token, _) in enumerate(rows) if row.is_told and token != NO_TOKEN]
            if where:
                places = [rows[index][2] for index in where]
                ids = [stop_id_of(tokens[index]) or tokens[index] for index in where]
                step = step._replace(logprob_rows=np.array(where), logprobs=told(places, ids))
            self._listener.on_tokens(step)


mstar.serving.backend.EngineClient = EchoClient
