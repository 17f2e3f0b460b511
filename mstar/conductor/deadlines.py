"""When the next request runs out of time."""

from __future__ import annotations

import time
from collections.abc import Callable

from mstar.utils.errors import ErrorCode

NEVER = 2**63 - 1
_FIELD = "timeout_ms"
EXPIRED = f"{_FIELD}: the request's time ran out before it could run"
MIN_STEPS = 100  # before which it is not known how fast a step can be
SAFETY = 2  # so many times faster than ever before a step may still be


def is_late(code: ErrorCode, message: str) -> bool:
    """Whether an error says that a request's time was over, or too short, before it ran."""
    return code is ErrorCode.UNAVAILABLE and message.startswith(f"{_FIELD}: ")


class Deadlines:
    """A lower bound of all deadlines of requests that have not ended, so that a step compares one number.

    Times are nanoseconds of the machine's monotonic clock, :data:`NEVER` without a deadline.  The deadline of a
    request that ended early stays in the bound until it has passed, or somebody looks through all of them.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.now_ns = clock
        self._earliest = NEVER
        self._quickest_ns = NEVER  # step of all so far
        self._num_steps = 0
        self._landed_ns = 0

    def landed(self, launched_ns: int) -> int:
        """A step that was launched then has landed; the nanoseconds that it took.

        Steps run one after the other, so that is the time since the later of its launch and the last landing.
        """
        now_ns = self.now_ns()
        took_ns = now_ns - max(launched_ns, self._landed_ns)
        self._num_steps += 1
        self._quickest_ns = min(self._quickest_ns, took_ns)
        self._landed_ns = now_ns
        return took_ns

    def shortfall(self, deadline_ns: int) -> str | None:
        """Why a request that comes now cannot have a token by its deadline, in words; None where it may.

        Every request takes a step of its own, and none is taken to be faster than 1 / ``SAFETY`` of the quickest that
        there was, once there were ``MIN_STEPS``.  How long others will keep their rows is not known, since any of them
        may end or be cancelled at once, so the queue refuses nobody here.
        """
        left_ns = deadline_ns - self.now_ns()
        if left_ns <= 0:
            return EXPIRED
        least_ns = self._quickest_ns // SAFETY
        if self._num_steps < MIN_STEPS or left_ns >= least_ns:
            return None
        return (
            f"{_FIELD}: at least {least_ns / 1e6:.3f} ms before the deadline, which is 1/{SAFETY} of the quickest "
            f"step so far, got {left_ns / 1e6:.3f} ms"
        )

    def add(self, deadline_ns: int) -> None:
        self._earliest = min(self._earliest, deadline_ns)

    def are_due(self) -> bool:
        """Whether some request may have run out of time."""
        return self._earliest != NEVER and self._earliest <= self.now_ns()

    def reset(self, *remaining: int) -> None:
        """All deadlines of the requests that are left after a look through all of them."""
        self._earliest = min(remaining)
