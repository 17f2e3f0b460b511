"""How requests end: counted, told to the outbox, and taken out of the engine."""

from __future__ import annotations

from collections.abc import Mapping

from mstar.conductor.counters import Counters
from mstar.conductor.deadlines import EXPIRED
from mstar.conductor.protocols import StepEngine
from mstar.conductor.queue import Waiting
from mstar.conductor.report import Failure, Outbox
from mstar.conductor.request import FinishReason
from mstar.conductor.rows import RowTable
from mstar.utils.errors import ErrorCode, MstarError, Unavailable


class Departures:
    """Ends requests, one call each.  A row may be in a step in flight: what that brings is dropped by its id."""

    def __init__(self, engine: StepEngine, table: RowTable, counters: Counters, outbox: Outbox) -> None:
        self._engine = engine
        self._table = table
        self._counters = counters
        self._outbox = outbox

    def leave(self, row: int, reason: FinishReason) -> None:
        """Frees a row whose end was told already."""
        self._counters.finished[reason] += 1
        self._free(row)

    def end(self, row: int, reason: FinishReason) -> None:
        """Ends a row outside a step."""
        table = self._table
        self._outbox.add_end(int(table.request_id[row]), int(table.client[row]), int(table.ticket[row]), reason)
        self.leave(row, reason)

    def end_unrun(self, waiting: Waiting, reason: FinishReason) -> None:
        """Ends a request that never had a row."""
        self._counters.finished[reason] += 1
        self._outbox.add_end(waiting.request_id, waiting.client, waiting.ticket, reason)

    def fail(self, row: int, error: Exception) -> None:
        """Ends a row with an error."""
        table = self._table
        code, message = ErrorCode.INTERNAL, f"the engine failed: {type(error).__name__}: {error}"
        if isinstance(error, MstarError):
            code, message = error.code, str(error)
        self._report(int(table.request_id[row]), int(table.client[row]), int(table.ticket[row]), code, message)
        self._free(row)

    def fail_all(self, errors: Mapping[int, Exception]) -> None:
        """Ends the named requests, as far as they are still there, each with its error."""
        for request_id, error in errors.items():
            row = self._table.row_of.get(request_id)
            if row is not None:
                self.fail(row, error)

    def fail_unrun(self, waiting: Waiting, code: ErrorCode, message: str) -> None:
        """Ends a request that never had a row with an error."""
        self._report(waiting.request_id, waiting.client, waiting.ticket, code, message)

    def expire(self, waiting: Waiting) -> None:
        """Ends a request whose deadline passed before it had a row."""
        self._counters.expired += 1
        self.fail_unrun(waiting, ErrorCode.UNAVAILABLE, EXPIRED)

    def expire_row(self, row: int) -> None:
        """Ends a row whose deadline passed before its first step."""
        self._counters.expired += 1
        self.fail(row, Unavailable(EXPIRED))

    def _report(self, request_id: int, client: int, ticket: int, code: ErrorCode, message: str) -> None:
        self._counters.failed += 1
        self._outbox.add_failure(Failure(request_id, client, ticket, code, message))

    def _free(self, row: int) -> None:
        clock = self._engine.clock
        clock.mark("ends")
        self._engine.remove(int(self._table.request_id[row]))
        clock.mark("remove")
        self._table.leave(row)
        clock.mark("ends")
