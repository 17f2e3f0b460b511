"""Requests in the order in which they come, some of which come only after others have ended."""

from __future__ import annotations

import heapq

import numpy as np

from mstar.simulate.trace import NOBODY, Trace


class Arrivals:
    """Hands out the tickets of a trace as they fall due; :meth:`ended` makes those due that follow one."""

    def __init__(self, trace: Trace) -> None:
        firsts = np.flatnonzero(trace.follows == NOBODY)
        order = firsts[np.argsort(trace.due_ns[firsts], kind="stable")]
        self._tickets = order.tolist()[::-1]  # the next one last
        self._times = trace.due_ns[order].tolist()[::-1]
        self._due_ns = trace.due_ns
        self._next_of: dict[int, list[int]] = {}
        for ticket in np.flatnonzero(trace.follows != NOBODY).tolist():
            self._next_of.setdefault(int(trace.follows[ticket]), []).append(ticket)
        self._later: list[tuple[int, int]] = []  # a heap of those that became due

    def next_ns(self) -> int | None:
        """When the next one comes; None when nobody is known to come."""
        known = [times[0] for times in (self._times[-1:], [due for due, _ in self._later[:1]]) if times]
        return min(known, default=None)

    def take(self, now_ns: int, most: int) -> list[tuple[int, int]]:
        """Up to ``most`` that have come, as (time, ticket), in order."""
        taken: list[tuple[int, int]] = []
        while len(taken) < most:
            due = self.next_ns()
            if due is None or due > now_ns:
                break
            if self._times and self._times[-1] == due:
                taken.append((self._times.pop(), self._tickets.pop()))
            else:
                taken.append(heapq.heappop(self._later))
        return taken

    def ended(self, ticket: int, now_ns: int) -> None:
        """A request has ended, in whatever way."""
        for follower in self._next_of.pop(ticket, ()):
            heapq.heappush(self._later, (now_ns + int(self._due_ns[follower]), follower))
