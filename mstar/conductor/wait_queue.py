"""Requests that wait for room, in the order in which they shall join: priority, fair share, arrival."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mstar.conductor.fair_share import EVERYBODY, UNIT, FairShare, Rows
from mstar.conductor.passes import Passes
from mstar.conductor.pools import Pools
from mstar.conductor.prefix_lines import PrefixLines
from mstar.conductor.queue import Limits, Place, Waiting


class _Tenant(NamedTuple):
    """A tenant's requests that wait, by priority, first come first; none of the lines is empty."""

    number: int
    passes: Passes
    lines: dict[int, OrderedDict[int, Place]]

    def heads(self) -> list[Place]:
        """The first of each priority."""
        return [next(iter(line.values())) for line in self.lines.values()]


class WaitQueue:
    """Requests that wait for room, in the order in which they shall join; any of them can leave at any time.

    A request is *due* when no other with a higher priority waits, or once it has aged by as many levels as the highest
    priority of those that wait is above its own: its level is its priority and one more for each interval of
    ``priority_ageing_s`` since it came, up to the highest priority there is among those that wait.  (Intervals are
    those of one clock, so all requests age at the same moments.)  Of the requests that are due the tenant is next that
    was served least (:class:`~mstar.conductor.fair_share.FairShare`), and of its requests the one that came first.  Who
    is first stays so until it joins, leaves, or a higher priority comes that it is not due beside: others that are
    served less may not take the room that it waits for.

    In the place of a head that has its room, another request of its tenant may go that is due and finds at least the
    half of its prompt in the prefix cache (:meth:`preferred`), as long as nobody before it was passed
    ``prefix_passes`` times.  Then the shares decide anew, so between tenants this changes nothing.

    So with one tenant and one priority it is first come, first served.  Ageing ends at the highest priority there is,
    since beyond it age would outweigh the shares: who has sent a thousand requests has the oldest.

    What that guarantees:

    * of one tenant and priority, first come first served, but for those who pass, which nobody suffers more often than
      is said (:class:`~mstar.conductor.passes.Passes`);
    * of one tenant, a later request passes only while its level is higher, for at most ``priority_ageing_s`` times the
      difference of their priorities, and then the one that is the head already;
    * after ``priority_ageing_s`` times (``MAX_PRIORITY`` - its priority) a request is due whatever comes.  From then on
      it is passed only by the head, its tenant's earlier requests, and those of tenants that were served less than its
      own.
      The counter at which tenants begin rises with each request that joins, by its computed prompt tokens over the
      number of tenants that wait; once it is above that of the request's tenant, nobody who comes can pass.

    No call looks through the queue: a change costs the same however many wait, and to find the first takes one array
    minimum over tenants, also of those known from before (2 µs for 10,000).
    """

    def __init__(
        self, limits: Limits, rows: Rows, clock: Callable[[], int] = time.monotonic_ns, pools: Pools | None = None
    ) -> None:
        """``rows`` of those that run; ``clock`` tells nanoseconds; ``pools`` know what is cached."""
        self._clock = clock
        self._interval_ns = max(round(limits.priority_ageing_s * 1e9), 1)
        self._shares = FairShare(rows, limits.output_token_weight)
        self._places: dict[int, Place] = {}  # by request id, in order of arrival
        self._tenants: dict[str, _Tenant] = {}
        self._by_number: dict[int, _Tenant] = {}
        self._num_lines: Counter[int] = Counter()  # by priority
        self._highest = 0  # priority of those that wait
        self._head: Place | None = None
        self._prefixes = None if pools is None or not limits.prefix_passes else PrefixLines(pools)
        self._most_passes = limits.prefix_passes
        self._in_its_place: Place | None = None  # who was last said to join instead of the head
        self.num_tokens = 0
        self.num_pushed = 0  # ever: tells whether somebody arrived since

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._places

    def __iter__(self) -> Iterator[Waiting]:
        """All, in order of arrival; not to be changed meanwhile."""
        return (place.waiting for place in self._places.values())

    def num_of(self, tenant: str) -> int:
        """How many of one tenant wait."""
        known = self._tenants.get(tenant)
        return 0 if known is None else sum(map(len, known.lines.values()))

    def push(self, waiting: Waiting) -> None:
        request = waiting.request
        place = Place(waiting, self.num_pushed, request.request_priority - self._intervals())
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = _Tenant(self._shares.begin(request.tenant), Passes(), {})
            self._tenants[request.tenant] = self._by_number[tenant.number] = tenant
        line = tenant.lines.get(request.request_priority)
        if line is None:
            line = tenant.lines[request.request_priority] = OrderedDict()
            self._count_lines(request.request_priority, 1)
            line[waiting.request_id] = place
            self._put(tenant)
        else:
            line[waiting.request_id] = place
        if self._prefixes is not None and self._places:  # who waits alone passes nobody
            self._prefixes.add(place)
        self._places[waiting.request_id] = place
        self.num_tokens += request.num_prompt_tokens
        self.num_pushed += 1

    def head(self) -> Waiting | None:
        """The one that is to join next."""
        if not self._places:
            return None
        bound = self._bound()
        if self._head is None or self._head.height < bound:
            tenants = self._tenants
            tenant = next(iter(tenants.values())) if len(tenants) == 1 else self._by_number[self._shares.least(bound)]
            self._head = min((place for place in tenant.heads() if place.height >= bound), key=_number)
        return self._head.waiting

    def preferred(self) -> Waiting | None:
        """Another of the head's tenant that may join in the head's place, since half of its prompt or more is cached;
        None: it is the head's turn."""
        head, prefixes = self._head, self._prefixes
        if head is None or prefixes is None or not len(prefixes):
            return None
        name, bound = head.waiting.request.tenant, self._bound()
        tenant = self._tenants[name]
        due = [place for place in tenant.heads() if place.height >= bound]
        if tenant.passes.of(min(place.number for place in due)) >= self._most_passes:
            return None
        found = prefixes.first(name, [place.waiting.request.request_priority for place in due])
        best = min((place for place in found if place.height >= bound), key=_number, default=head)
        if best is head:
            return None
        self._in_its_place = best
        return best.waiting

    def may_pass(self, waiting: Waiting, most: int) -> bool:
        """Whether a request may join before those that are due before it, of which none was passed ``most`` times."""
        tenant = self._tenants[waiting.request.tenant]
        oldest = self._oldest_due(tenant)
        number = self._places[waiting.request_id].number
        return oldest is None or number <= oldest or tenant.passes.of(oldest) < most

    def first(self, count: int) -> Iterator[Waiting]:
        """The ``count`` that are to join next, in order, if each was to join at once and found nothing cached; the
        queue is not to be changed meanwhile."""
        head = self.head()
        if head is None:
            return
        yield head
        if count > 1:
            yield from itertools.islice(self._behind(head, count), count - 1)

    def join(self, waiting: Waiting, coming_tokens: int = 0) -> None:
        """A request leaves for its master row, or gets it without having waited, while nobody does; before that row's
        counts begin anew.  Of its prompt's tokens that are not cached, ``coming_tokens`` will be before it needs them.
        """
        place = self._places.get(waiting.request_id)
        if place is None:
            assert not self._places, "somebody waits"
            self._shares.seat(waiting.request.tenant, waiting.info.row)
            return
        tenant = self._tenants[waiting.request.tenant]
        prompt_tokens = waiting.request.num_prompt_tokens - waiting.info.cached_tokens - coming_tokens
        self._shares.join(tenant.number, waiting.info.row, prompt_tokens)
        if place is not self._head:
            self._note_pass(place, tenant)
        self._take(place, tenant)

    def remove(self, request_id: int) -> Waiting | None:
        """Takes a request away that will not run; None when it is not here."""
        place = self._places.get(request_id)
        if place is None:
            return None
        self._shares.settle()
        self._take(place, self._tenants[place.waiting.request.tenant])
        return place.waiting

    def _note_pass(self, place: Place, tenant: _Tenant) -> None:
        """Somebody joins who is not the head; in its place, if that was said: then the shares decide anew."""
        oldest = self._oldest_due(tenant)
        if oldest is not None and oldest < place.number:
            tenant.passes.note(place.number, min(tenant.heads(), key=_number).number)
        if place is self._in_its_place:
            self._head = None

    def _oldest_due(self, tenant: _Tenant) -> int | None:
        bound = self._bound()
        return min((place.number for place in tenant.heads() if place.height >= bound), default=None)

    def _take(self, place: Place, tenant: _Tenant) -> None:
        request, request_id = place.waiting.request, place.waiting.request_id
        del self._places[request_id]
        self.num_tokens -= request.num_prompt_tokens
        line = tenant.lines[request.request_priority]
        was_first = next(iter(line)) == request_id
        del line[request_id]
        if self._prefixes is not None:
            self._prefixes.remove(place)
        if not line:
            if self._prefixes is not None:
                self._prefixes.end(request.tenant, request.request_priority)
            del tenant.lines[request.request_priority]
            self._count_lines(request.request_priority, -1)
        if not tenant.lines:
            del self._tenants[request.tenant], self._by_number[tenant.number]
            self._shares.end(tenant.number)
        elif was_first:
            self._put(tenant)
        if place is self._head:
            self._head = None

    def _intervals(self) -> int:
        """Ageing intervals that have passed."""
        return self._clock() // self._interval_ns

    def _bound(self) -> int:
        """The least height of those that are due."""
        return EVERYBODY if len(self._num_lines) < 2 else self._highest - self._intervals()

    def _put(self, tenant: _Tenant) -> None:
        heights = [place.height for place in tenant.heads()]
        self._shares.put(tenant.number, heights[0] if len(heights) == 1 else max(heights))

    def _count_lines(self, priority: int, change: int) -> None:
        count = self._num_lines[priority] + change
        if count:
            self._num_lines[priority] = count
        else:
            del self._num_lines[priority]
        self._highest = max(self._num_lines, default=0)

    def _behind(self, head: Waiting, count: int) -> Iterator[Waiting]:
        """Those that join after ``head`` as :meth:`first` says, at least ``count`` of them in order."""
        bound = self._bound()
        served: dict[int, int] = {}
        heap: list[tuple[int, int, int, int, Place, Iterator[Place]]] = []  # one entry per line: where its first is

        def enter(number: int, rest: Iterator[Place]) -> None:
            place = next((each for each in rest if each.waiting is not head), None)
            if place is not None:
                level = min(place.height, bound) if bound != EVERYBODY else 0
                heapq.heappush(heap, (-level, served[number], place.number, number, place, rest))

        ahead = self._tenants[head.request.tenant].number
        for number in self._shares.first(count, bound):
            served[number] = self._shares.served(number) + (number == ahead) * head.request.num_prompt_tokens * UNIT
            for line in self._by_number[number].lines.values():
                enter(number, iter(line.values()))
        while heap:
            level, counter, order, number, place, rest = heapq.heappop(heap)
            if counter != served[number]:  # another line of this tenant went first
                heapq.heappush(heap, (level, served[number], order, number, place, rest))
                continue
            yield place.waiting
            served[number] += place.waiting.request.num_prompt_tokens * UNIT
            enter(number, rest)


def _number(place: Place) -> int:
    return place.number
