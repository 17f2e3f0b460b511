"""What a step tells the outside: arrays over rows, and the requests that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mstar.conductor.request import NO_TOKEN, FinishReason
from mstar.utils.errors import ErrorCode


@dataclass(frozen=True)
class Failure:
    """A request that ended with an error."""

    request_id: int
    client: int
    ticket: int
    code: ErrorCode
    message: str


@dataclass
class StepReport:
    """Rows that brought a token or ended, one entry each; every array is [rows].

    ``clients`` and ``tickets`` are what the request was submitted under.  ``tokens`` holds -1 where a row ends
    without output, and the stop id that ended it as :func:`~mstar.conductor.request.stop_code`; ``finish`` is a
    :class:`FinishReason`.  ``logprobs``: records :data:`~mstar.conductor.request.LOGPROB` [m] of the rows at
    ``logprob_rows`` int64 [m], ascending; None where nobody asked.  ``num_stepped`` counts rows of the step that was
    launched: 0 means that none could run.  ``cached_prompt_tokens`` are what the requests that joined found in a
    prefix cache.  ``only_client`` is the client of every row; None where there are several, or nobody looked.
    Arrays may be shared with later reports: read only.
    """

    request_ids: np.ndarray  # int64
    clients: np.ndarray  # int64
    tickets: np.ndarray  # int64
    tokens: np.ndarray  # int32
    finish: np.ndarray  # uint8
    failures: list[Failure] = field(default_factory=list)
    num_stepped: int = 0
    cached_prompt_tokens: int = 0
    only_client: int | None = None
    logprob_rows: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether it tells of no request."""
        return not (self.request_ids.size or self.failures or self.prompt_logprobs)


@dataclass(frozen=True)
class PromptLogprobs:
    """Of one request's prompt, told before its first token: records LOGPROB [prompt tokens - 1], those of the second
    token on."""

    client: int
    ticket: int
    logprobs: np.ndarray


class Named(NamedTuple):
    """Who the rows of a chunk are; every array int64 [rows], ``only_client`` as in :class:`StepReport`."""

    request_ids: np.ndarray
    clients: np.ndarray
    tickets: np.ndarray
    only_client: int | None


def named(request_ids: np.ndarray, clients: np.ndarray, tickets: np.ndarray) -> Named:
    """Rows, at least one of them, by what they were submitted under."""
    first = clients[0]
    return Named(request_ids, clients, tickets, int(first) if (clients == first).all() else None)


class Outbox:
    """Collects what one report will say: array chunks from steps, single rows from departures."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Named, np.ndarray, np.ndarray]] = []
        self._failures: list[Failure] = []
        self._num_stepped = 0
        self._cached_prompt_tokens = 0
        self._logprobs: list[tuple[np.ndarray, np.ndarray]] = []  # rows among all chunks' rows, their records
        self._prompt_logprobs: list[PromptLogprobs] = []

    def __bool__(self) -> bool:
        return bool(self._chunks or self._failures)

    def add_step(self, named: Named, tokens: np.ndarray, finish: np.ndarray) -> None:
        """Rows of one step: tokens int32 [rows], finish uint8 [rows]."""
        self._chunks.append((named, tokens, finish))

    def add_logprobs(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Records LOGPROB [m] of the step to be added next, of its rows ``rows`` int64 [m], ascending."""
        self._logprobs.append((rows + sum(tokens.size for _, tokens, _ in self._chunks), records))

    def add_prompt_logprobs(self, prompt: PromptLogprobs) -> None:
        self._prompt_logprobs.append(prompt)

    def add_launch(self, num_rows: int) -> None:
        self._num_stepped += num_rows

    def add_cached(self, tokens: int) -> None:
        self._cached_prompt_tokens += tokens

    def add_end(self, request_id: int, client: int, ticket: int, finish: FinishReason) -> None:
        """A request that ended outside a step."""
        ids = np.array([[request_id], [client], [ticket]], np.int64)
        named = Named(ids[0], ids[1], ids[2], client)
        self._chunks.append((named, np.array([NO_TOKEN], np.int32), np.array([finish], np.uint8)))

    def add_failure(self, failure: Failure) -> None:
        self._failures.append(failure)

    def take(self) -> StepReport:
        """All that was collected since the last take."""
        rows, tokens, finish = self._chunks[0] if len(self._chunks) == 1 else _joined(self._chunks)
        report = StepReport(
            rows.request_ids,
            rows.clients,
            rows.tickets,
            tokens,
            finish,
            self._failures,
            self._num_stepped,
            self._cached_prompt_tokens,
            rows.only_client,
        )
        self._chunks, self._failures, self._num_stepped, self._cached_prompt_tokens = [], [], 0, 0
        if self._logprobs:
            each_rows, each_records = zip(*self._logprobs, strict=True)
            report.logprob_rows, report.logprobs = np.concatenate(each_rows), np.concatenate(each_records)
            self._logprobs = []
        if self._prompt_logprobs:
            report.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        return report


def _joined(chunks: list[tuple[Named, np.ndarray, np.ndarray]]) -> tuple[Named, np.ndarray, np.ndarray]:
    if not chunks:
        return _NOBODY, np.empty(0, np.int32), np.empty(0, np.uint8)
    rows, tokens, finish = zip(*chunks, strict=True)
    ids, clients, tickets, only = zip(*rows, strict=True)
    only_client = only[0] if only.count(only[0]) == len(only) else None
    joined = Named(np.concatenate(ids), np.concatenate(clients), np.concatenate(tickets), only_client)
    return joined, np.concatenate(tokens), np.concatenate(finish)


_NOBODY = Named(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), None)


def empty_report(*, failures: Sequence[Failure] = (), prompt_logprobs: Sequence[PromptLogprobs] = ()) -> StepReport:
    """A report without rows."""
    names, tokens, finish = _joined([])
    return StepReport(
        names.request_ids,
        names.clients,
        names.tickets,
        tokens,
        finish,
        list(failures),
        prompt_logprobs=list(prompt_logprobs),
    )
