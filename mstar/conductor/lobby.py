"""Requests without a row: those that are being prepared, and the queue of those that could join."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator

from mstar.conductor.deadlines import NEVER
from mstar.conductor.departures import Departures
from mstar.conductor.parameters import RefusedParameter
from mstar.conductor.preparing import Prepare, Preparing
from mstar.conductor.queue import Limits, Waiting, num_waiting
from mstar.conductor.wait_queue import WaitQueue
from mstar.utils.errors import ErrorCode

log = logging.getLogger(__name__)


class Lobby:
    """A request that needs preparation joins the queue once that is done."""

    def __init__(self, queue: WaitQueue, prepare: Prepare, limits: Limits, departures: Departures) -> None:
        self.queue = queue
        self._preparing = Preparing(prepare)
        self._limits = limits
        self._departures = departures
        # Deadlines and ids, a heap; of those that have left too, until their time comes or they are most of it.
        self._deadlines: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.queue) + len(self._preparing)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.queue or request_id in self._preparing

    def __iter__(self) -> Iterator[Waiting]:
        """All of them; they may leave meanwhile."""
        return iter([*self.queue, *self._preparing])

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all."""
        return self.queue.num_tokens + self._preparing.num_tokens

    def add(self, waiting: Waiting) -> None:
        if waiting.request.deadline_ns:
            if len(self._deadlines) > 2 * len(self) + 64:
                self._deadlines = [each for each in self._deadlines if each[1] in self]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (waiting.request.deadline_ns, waiting.request_id))
        for config in waiting.info.resource_configs.values():
            if config.needs_preparation:
                self._preparing.add(waiting)
                return
        self.queue.push(waiting)

    def remove(self, request_id: int) -> Waiting | None:
        """Takes a request away; None when it is not here."""
        return self.queue.remove(request_id) or self._preparing.remove(request_id)

    def refusal(self, tenant: str, num_free_rows: int, is_open: Callable[[], bool]) -> str | None:
        """Which bound those who wait exceed now that a request of ``tenant`` came, in words.

        Who is being prepared is coming to a row; so are all while the rows are not ``is_open``, although some are
        free, which is asked only if it matters.
        """
        limits, num_all = self._limits, len(self)
        num_of_tenant = self._num_of(tenant) if limits.max_queued_requests_per_tenant else 0
        if limits.refusal(num_all, self.num_tokens, tenant, num_of_tenant) is None:
            return None
        coming, coming_of_tenant = num_all, num_of_tenant
        if is_open():
            coming, coming_of_tenant = len(self._preparing), self._preparing.num_of(tenant)
        return limits.refusal(
            num_waiting(num_all, coming, num_free_rows),
            self.num_tokens,
            tenant,
            num_waiting(num_of_tenant, coming_of_tenant, num_free_rows),
        )

    def take_prepared(self) -> None:
        """Queues those that are ready; ends those that never will be."""
        if not len(self._preparing):
            return
        for waiting, error in self._preparing.take():
            if error is None:
                self.queue.push(waiting)
            elif isinstance(error, ValueError):  # a resource's word on the request's parameters
                self._departures.fail_unrun(waiting, ErrorCode.INVALID_ARG, str(RefusedParameter(error)))
            else:
                log.error("request %d could not be prepared", waiting.request_id, exc_info=error)
                message = f"the engine failed: {type(error).__name__}: {error}"
                self._departures.fail_unrun(waiting, ErrorCode.INTERNAL, message)

    def expire(self, now_ns: int) -> int:
        """Ends those whose deadline has come; the earliest deadline of the others, :data:`NEVER` without one."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now_ns or deadlines[0][1] not in self):
            waiting = self.remove(heapq.heappop(deadlines)[1])
            if waiting is not None:
                self._departures.expire(waiting)
        return deadlines[0][0] if deadlines else NEVER

    def _num_of(self, tenant: str) -> int:
        return self.queue.num_of(tenant) + self._preparing.num_of(tenant)
