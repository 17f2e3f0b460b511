"""What a step tells the outside: arrays over rows, and the requests that failed."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    without output; ``finish`` is a :class:`FinishReason`.  ``num_stepped`` counts rows of the step that was
    launched: 0 means that none could run.  ``cached_prompt_tokens`` are what the requests that joined found in a
    prefix cache.
    """

    request_ids: np.ndarray  # int64
    clients: np.ndarray  # int64
    tickets: np.ndarray  # int64
    tokens: np.ndarray  # int32
    finish: np.ndarray  # uint8
    failures: list[Failure] = field(default_factory=list)
    num_stepped: int = 0
    cached_prompt_tokens: int = 0


class Outbox:
    """Collects what one report will say: array chunks from steps, single rows from departures."""

    def __init__(self) -> None:
        self._chunks: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._failures: list[Failure] = []
        self._num_stepped = 0
        self._cached_prompt_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._chunks or self._failures)

    def add_step(
        self,
        request_ids: np.ndarray,
        clients: np.ndarray,
        tickets: np.ndarray,
        tokens: np.ndarray,
        finish: np.ndarray,
    ) -> None:
        self._chunks.append((request_ids, clients, tickets, tokens, finish))

    def add_launch(self, num_rows: int) -> None:
        self._num_stepped += num_rows

    def add_cached(self, tokens: int) -> None:
        self._cached_prompt_tokens += tokens

    def add_end(self, request_id: int, client: int, ticket: int, finish: FinishReason) -> None:
        """A request that ended outside a step."""
        ids = np.array([[request_id], [client], [ticket]], np.int64)
        self._chunks.append((ids[0], ids[1], ids[2], np.array([NO_TOKEN], np.int32), np.array([finish], np.uint8)))

    def add_failure(self, failure: Failure) -> None:
        self._failures.append(failure)

    def take(self) -> StepReport:
        """All that was collected since the last take."""
        if len(self._chunks) == 1:
            columns = self._chunks[0]
        elif self._chunks:
            columns = tuple(np.concatenate(column) for column in zip(*self._chunks, strict=True))  # type: ignore[assignment]
        else:
            columns = _EMPTY
        report = StepReport(*columns, self._failures, self._num_stepped, self._cached_prompt_tokens)
        self._chunks, self._failures, self._num_stepped, self._cached_prompt_tokens = [], [], 0, 0
        return report


_EMPTY = (
    np.empty(0, np.int64),
    np.empty(0, np.int64),
    np.empty(0, np.int64),
    np.empty(0, np.int32),
    np.empty(0, np.uint8),
)
