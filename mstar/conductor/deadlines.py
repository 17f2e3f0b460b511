"""When the next request runs out of time."""

from __future__ import annotations

import time
from collections.abc import Callable

NEVER = 2**63 - 1


class Deadlines:
    """A lower bound of all deadlines of requests that have not ended, so that a step compares one number.

    Times are nanoseconds of the machine's monotonic clock, :data:`NEVER` without a deadline.  The deadline of a
    request that ended early stays in the bound until it has passed, or somebody looks through all of them.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.now_ns = clock
        self._earliest = NEVER

    def add(self, deadline_ns: int) -> None:
        self._earliest = min(self._earliest, deadline_ns)

    def are_due(self) -> bool:
        """Whether some request may have run out of time."""
        return self._earliest != NEVER and self._earliest <= self.now_ns()

    def reset(self, *remaining: int) -> None:
        """All deadlines of the requests that are left after a look through all of them."""
        self._earliest = min(remaining)


def deadline_of(deadline_ns: int) -> int:
    """A request's deadline, where 0 is none, as a time that can be compared."""
    return deadline_ns or NEVER
