"""What each tenant has been served, and which of those that wait was served least."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from mstar.conductor.row_counts import RowCounts

UNIT = 1024  # parts of a token in which service is counted, so that all of it is exact
NOBODY = np.iinfo(np.int64).min  # the place of a tenant of whom nobody waits
EVERYBODY = NOBODY + 1  # a bound of places that shuts nobody out
_FAR = 2**62  # and above: the rank of a tenant that is not asked about


class Rows(Protocol):
    """The rows of running requests; of :class:`~mstar.conductor.rows.RowTable`."""

    request_id: np.ndarray  # int64 [capacity], -1 without a request
    generated: RowCounts


class FairShare:
    """A counter of served tokens per tenant (virtual token counter: Sheng et al., "Fairness in Serving Large Language
    Models", OSDI 2024).

    A computed prompt token counts 1, when its request joins; a generated one counts ``output_weight``.  A tenant of
    whom somebody begins to wait starts at its own counter or at the common level, whichever is higher, so idleness
    earns nothing.  The level is what a tenant that waits all the time is served: it rises by what those that wait are
    served, divided by their number.  So it rises with every request that joins, and a tenant waits for a bounded
    service of others, also if there is a new tenant in every request (with the least counter in its place, those would
    all start below one that has been served already).  While nobody waits nothing is withheld from anybody: then all
    that was served is forgotten.

    Arrays by tenant [number]: ``_served`` in 1 / ``UNIT`` tokens; ``_waits`` 1 if somebody does, and ``_place``, which
    the queue sets, of the first; ``_rank``, which is ``_served`` where that place is at least ``_bound``.  By master
    row: whose request it runs or ran last, and how many of its tokens were counted.  They are counted when somebody
    looks, before the row changes hands.
    """

    def __init__(self, rows: Rows, output_weight: float) -> None:
        self._rows = rows
        self._weight = round(output_weight * UNIT)
        self._owner = np.zeros(rows.request_id.size, np.int64)
        self._counted = np.zeros(rows.request_id.size, np.int64)
        self._number: dict[str, int] = {}
        self._free: list[int] = []
        self._served = np.zeros(0, np.int64)
        self._place = np.full(0, NOBODY, np.int64)
        self._waits = np.zeros(0, np.int64)
        self._rank = np.full(0, _FAR, np.int64)
        self._bound = EVERYBODY
        self._num_waiting = 0  # tenants
        self._level = 0
        self._undivided = 0  # what the level has not risen by, for want of a whole part

    def begin(self, tenant: str) -> int:
        """The number of a tenant, of whom nobody waited, and somebody does from now on: give it a place."""
        number = self._number.get(tenant)
        self.settle(alone=number is None)
        if number is None:
            number = self._add(tenant)
        if not self._num_waiting:
            self._level = max(self._level, int(self._served.max()))
            self._served[:] = self._level  # else what some make from now on would only catch up with it
        self._served[number] = max(self._served.item(number), self._level)
        self._level += 1  # of tenants that begin between two joins, the first is first
        self._num_waiting += 1
        self._waits[number] = 1
        return number

    def put(self, number: int, place: int) -> None:
        """The first of this tenant that waits is at ``place``."""
        self._place[number] = place
        self._rank[number] = self._served[number] if place >= self._bound else _FAR

    def end(self, number: int) -> None:
        """Nobody of this tenant waits any more.  What it was served meanwhile is to be settled first."""
        self._place[number], self._rank[number], self._waits[number] = NOBODY, _FAR, 0
        self._num_waiting -= 1

    def join(self, number: int, row: int, prompt_tokens: int) -> None:
        """A request of a tenant that waits gets a master row, and has so many prompt tokens to compute.  To be told
        before the row's counts begin anew; nothing is settled in between."""
        self.settle()
        cost = max(prompt_tokens, 1) * UNIT
        self._served[number] += cost
        self._share_out(cost)
        self._owner[row], self._counted[row] = number, 0
        self.put(number, self._place.item(number))

    def seat(self, tenant: str, row: int) -> None:
        """A request gets a master row while nobody waits: of what its tenant is served, only tokens that it makes once
        somebody does will count.  To be told before the row's counts begin anew."""
        number = self._number.get(tenant)
        if number is None:
            number = self._add(tenant)
        self._owner[row], self._counted[row] = number, 0

    def least(self, bound: int) -> int:
        """Of the tenants at ``bound`` or above, of which there is one, the one that was served least."""
        self.settle()
        self._set_bound(bound)
        return int(self._rank.argmin())

    def served(self, number: int) -> int:
        """What the tenant was served, in 1 / ``UNIT`` tokens."""
        return self._served.item(number)

    def first(self, count: int, bound: int) -> Iterator[int]:
        """The ``count`` tenants to be picked first, in any order; all there are where they are fewer.

        Those at ``bound`` or above come by what they were served, then the others by place, and by that.
        """
        self.settle()
        self._set_bound(bound)
        waiting = self._waits.nonzero()[0]
        if waiting.size > count:
            rank = self._rank[waiting]
            low = np.where(rank < _FAR, rank - _FAR, -self._place[waiting])
            last = np.partition(low, count - 1)[count - 1]
            level = waiting[low == last]
            level = level[np.argsort(self._served[level], kind="stable")]
            waiting = np.concatenate((waiting[low < last], level))[:count]
        yield from waiting.tolist()

    def settle(self, alone: bool = False) -> None:
        """Counts the tokens that have come since; ``alone``: also where there is one tenant, who needs no counting."""
        if len(self._number) < 2 and not alone:
            return
        made = self._rows.generated.values
        if made.tobytes() == self._counted.tobytes():  # the cheapest way to find out
            return
        costs = made - self._counted
        self._counted[:] = made
        if self._number:
            costs *= self._weight
            np.add.at(self._served, self._owner, costs)
            np.add.at(self._rank, self._owner, costs)
            self._share_out(int(costs.dot(self._waits[self._owner])))

    def _share_out(self, cost: int) -> None:
        if self._num_waiting:
            risen, self._undivided = divmod(self._undivided + cost, self._num_waiting)
            self._level += risen

    def _set_bound(self, bound: int) -> None:
        if bound != self._bound:
            self._bound = bound
            self._rank = np.where(self._place >= bound, self._served, _FAR)

    def _add(self, tenant: str) -> int:
        if not self._free:
            self._make_room()
        number = self._free.pop()
        self._number[tenant] = number
        self._served[number] = 0
        return number

    def _make_room(self) -> None:
        """Forgets tenants that would start at the level anyway; where that is not half of them, takes more room."""
        size = self._served.size
        keeps = self._waits > 0
        if self._num_waiting:
            keeps |= self._served > self._level
        keeps[self._owner[self._rows.request_id >= 0]] = True
        self._number = {tenant: number for tenant, number in self._number.items() if keeps[number]}
        self._free = [number for number in range(size - 1, -1, -1) if not keeps[number]]
        if 2 * len(self._free) < size or not size:
            more = max(size, 16)
            self._served = np.concatenate((self._served, np.zeros(more, np.int64)))
            self._place = np.concatenate((self._place, np.full(more, NOBODY, np.int64)))
            self._waits = np.concatenate((self._waits, np.zeros(more, np.int64)))
            self._rank = np.concatenate((self._rank, np.full(more, _FAR, np.int64)))
            self._free = [*range(size + more - 1, size - 1, -1), *self._free]
