"""Who may join: what a request may come to hold, against what the running ones hold and may still take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mstar.engine.resources.kv.config import PagedKVConfig
from mstar.engine.resources.kv.pages import PageArena

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Demand:
    """What a request may come to hold in each of ``labels`` streams: from ``prompt`` tokens up to ``target``.

    ``target`` 0 reserves nothing.  ``lent`` pages come out of the prefix index and are in use by others already, so
    that taking them takes nothing away.
    """

    prompt: int
    target: int
    lent: int = 0
    labels: int = 1


@dataclass(frozen=True)
class Running:
    """The requests that have reserved, as arrays int64 [n], in pages but for ``remaining``.

    ``start`` tokens are in each stream now, one less than its prompt before the step that stores it; ``remaining``
    steps from now it holds its target.
    """

    held: np.ndarray
    claim: np.ndarray  # most pages it is promised
    start: np.ndarray
    remaining: np.ndarray
    labels: np.ndarray

    def join(self, other: Running) -> Running:
        """Both groups."""
        mine, others = vars(self), vars(other)
        return Running(**{name: np.concatenate((mine[name], others[name])) for name in mine})

    def after(self, time: int, page_size: int) -> Running:
        """Those who are still there ``time`` steps from now, as they are then."""
        stays = self.remaining > time
        start, labels = self.start[stays] + time, self.labels[stays]
        held = np.maximum(self.held[stays], -(-start // page_size) * labels)
        return Running(held, self.claim[stays], start, self.remaining[stays] - time, labels)


def _given_back(running: Running, times: np.ndarray) -> np.ndarray:
    """Pages, promised ones included, that are back at each of ``times`` [t], int64 [t]."""
    has_left = running.remaining <= times[:, None]
    return np.where(has_left, np.maximum(running.claim, running.held), 0).sum(1)


def footprints(running: Running, times: np.ndarray, page_size: int) -> np.ndarray:
    """Pages that all of ``running`` hold together at each of ``times`` int64 [t] steps from now, int64 [t].

    Every request gains one token a step and leaves after the step in which it holds its target.
    """
    tokens = running.start + np.minimum(times[:, None], running.remaining)
    pages = -(-tokens // page_size) * running.labels
    return np.where(times[:, None] <= running.remaining, pages, 0).sum(1)


def peak(running: Running, page_size: int) -> int:
    """The highest of :func:`footprints`: one request's grows until it leaves, so it is reached when one leaves."""
    return int(footprints(running, np.unique(running.remaining), page_size).max(initial=0))


def is_safe(held: np.ndarray, short: np.ndarray, free: int) -> bool:
    """Whether requests can all end in some order, each with what is free and what those before it gave back.

    ``held`` and ``short`` [n]: pages held, and pages wanted before the end.  Taking the least short first is best:
    the banker's algorithm (Dijkstra, EWD 623).
    """
    order = np.argsort(short, kind="stable")
    back = np.cumsum(held[order])
    return bool((short[order] <= free + np.concatenate(([0], back[:-1]))).all())


class AdmissionGate:
    """Lets requests join so that those inside can always go on.

    Fit "sum": all that anybody is promised fits at one time.  "peak": or else the highest number of pages held at one
    time does, if all proceed alike, and they could end one after the other if they do not.  "none": the prompts fit.

    Order "backfill" lets a later request pass the head of the queue when the head can start no later with it than
    without it (EASY): it ends before then, or leaves room beside it.

    Host state by master row: the demand of whoever is inside.  ``state()`` answers (stored tokens, held pages), int64
    by master row, as of now.
    """

    def __init__(
        self,
        config: PagedKVConfig,
        arena: PageArena,
        total_rows: int,
        state: Callable[[], tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self.fit = config.admission_fit
        self.order = config.admission_order
        self.backfill_window = config.backfill_window if self.order == "backfill" else 0
        self._page_size = config.page_size
        self._arena = arena
        self._state = state
        self._prompt = np.zeros(total_rows, np.int64)
        self._target = np.zeros(total_rows, np.int64)
        self._labels = np.ones(total_rows, np.int64)
        self._claim = np.zeros(total_rows, np.int64)  # most pages that each is promised
        self._changes = 0
        self._seen = (-1, -1)
        self._room = 0
        self._version = 0
        self._head: tuple[tuple[int, int, int], Demand, int] | None = None

    def reserve(self, row: int, demand: Demand) -> None:
        """The request on master row ``row``, which holds nothing yet, is inside and is promised its demand."""
        claim, replaced = self._pages(demand), self._claim[row]
        self._prompt[row], self._target[row], self._labels[row] = demand.prompt, demand.target, demand.labels
        self._claim[row] = claim
        is_fresh = not replaced and self._seen == (self._changes, self._arena.version)
        self._changes += 1
        if is_fresh and self.fit != "peak":  # what has become of the room is plain, and no refusal was wrong
            self._room -= claim
            self._seen = (self._changes, self._arena.version)

    def forget(self, rows: np.ndarray | int) -> None:
        """The requests on ``rows`` [n] have left."""
        self._prompt[rows] = self._target[rows] = self._claim[rows] = 0
        self._changes += 1

    @property
    def promised(self) -> int:
        """Pages that those inside are promised and do not hold yet."""
        _, held = self._state()
        return int(np.maximum(self._claim - held, 0).sum())

    @property
    def version(self) -> int:
        """Moves whenever a refusal may have become wrong; what was refused need not be asked again before.

        By "sum" and "none" that is when room grew: a promised page that is taken changes nothing.  By "peak" every
        page that comes or goes counts.
        """
        self._refresh()
        return self._version

    def can_join(self, need: Demand) -> bool:
        """Whether a request may start now, beside all that are inside.  It is not inside before :meth:`reserve`."""
        self._refresh()
        pages = self._pages(need)
        if pages - need.lent <= self._room:
            return True
        if self.fit != "peak" or self._pages_of(need.prompt, need) - need.lent > self._arena.num_available:
            return False
        return self._fits_peak(self._running().join(self._alone(need)))

    def may_pass(self, need: Demand, head: Demand) -> bool:
        """Whether a request may join before ``head``, the first of the queue, which may not join now."""
        if self.order != "backfill" or not self.can_join(need):
            return False
        start = self._start_of_head(head)
        if start == NEVER:
            return True
        room = self._room - self._pages(need) + need.lent
        return self._fits_at(start, head, self._running().join(self._alone(need)), room)

    def start_of(self, head: Demand) -> int:
        """Steps until ``head`` can join if all inside stay to their ends; NEVER if it cannot even then."""
        self._refresh()
        running = self._running()
        ends = np.unique(running.remaining)
        fits = self._room + _given_back(running, ends) >= self._pages(head) - head.lent
        start = int(ends[np.argmax(fits)]) if fits.any() else NEVER
        if self.fit == "peak" and head.target:
            times = self._turning_points(head, running, ends)
            times = times[times < start]
            times = times[self._peaks_with(head, running, ends, times) <= self._capacity()]
            start = next((t for t in times.tolist() if self._fits_at(t, head, running, self._room)), start)
        return start

    def _start_of_head(self, head: Demand) -> int:
        """:meth:`start_of`, remembered: many candidates are compared with one head."""
        stored, _ = self._state()
        now = (self._changes, self._arena.version, int(stored.sum()))
        if self._head is None or self._head[:2] != (now, head):
            self._head = (now, head, self.start_of(head))
        return self._head[2]

    def _fits_at(self, time: int, head: Demand, running: Running, room: int) -> bool:
        """:meth:`can_join` of ``head``, ``time`` steps from now, with ``running`` and ``room`` pages not promised."""
        if room + _given_back(running, np.array([time]))[0] >= self._pages(head) - head.lent:
            return True
        return self.fit == "peak" and self._fits_peak(running.after(time, self._page_size).join(self._alone(head)))

    def _turning_points(self, head: Demand, running: Running, ends: np.ndarray) -> np.ndarray:
        """The times at which the peak with ``head`` may begin to fit, in order, int64 [t].

        The later it joins, the fewer pages it has when another leaves; or it leaves first; or it leaves last.
        """
        start, stay = head.prompt - 1, head.target - head.prompt + 1
        room = self._capacity() - footprints(running, ends, self._page_size)
        small_enough = ends + start - room // head.labels * self._page_size
        times = np.unique(np.concatenate(([0], ends, small_enough, ends + 1 - stay)))
        return times[times >= 0]

    def _peaks_with(self, head: Demand, running: Running, ends: np.ndarray, times: np.ndarray) -> np.ndarray:
        """The most pages held at one time if ``head`` joins at each of ``times`` [t], from then on, int64 [t]."""
        size, alone = self._page_size, self._alone(head)
        age = ends - times[:, None]
        beside = footprints(alone, age.reshape(-1), size).reshape(age.shape)
        among = np.where(age > 0, footprints(running, ends, size) + beside, 0).max(1, initial=0)
        return np.maximum(among, footprints(running, times + alone.remaining, size) + alone.claim)

    def _fits_peak(self, running: Running) -> bool:
        capacity = self._capacity()
        if peak(running, self._page_size) > capacity:
            return False
        short = np.maximum(running.claim - running.held, 0)
        return is_safe(running.held, short, capacity - int(running.held.sum()))

    def _capacity(self) -> int:
        """Pages that those inside may share out: all but those of streams that have reserved nothing."""
        _, held = self._state()
        return self._arena.num_usable - int(held[self._target == 0].sum())

    def _running(self) -> Running:
        stored, held = self._state()
        rows = np.flatnonzero(self._target)
        prompt, target, labels = self._prompt[rows], self._target[rows], self._labels[rows]
        start = np.maximum(stored[rows], prompt - 1)
        return Running(held[rows], self._claim[rows], start, np.maximum(target - start, 0), labels)

    def _alone(self, need: Demand) -> Running:
        """A joining request by itself; nobody, if it reserves nothing."""
        start = need.prompt - 1
        values = (0, self._pages(need), start, max(need.target - start, 0), need.labels)
        arrays = [np.array([value] if need.target else [], np.int64) for value in values]
        return Running(*arrays)

    def _pages(self, need: Demand) -> int:
        """Most pages that it is promised: those of its target, or by fit "none" those of its prompt."""
        tokens = min(need.prompt, need.target) if self.fit == "none" else need.target
        return self._pages_of(tokens, need)

    def _pages_of(self, tokens: int, need: Demand) -> int:
        return -(-tokens // self._page_size) * need.labels

    def _refresh(self) -> None:
        """Brings room and version up to date; a comparison when nothing happened since."""
        now = (self._changes, self._arena.version)
        if now == self._seen:
            return
        self._seen = now
        room = self._arena.num_available - self.promised
        if room > self._room or self.fit == "peak":
            self._version += 1
        self._room = room
