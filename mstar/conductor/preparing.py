"""Requests with slow work ahead of them, which threads do beside the steps: a grammar to compile."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from mstar.conductor.queue import Waiting
from mstar.engine.resources.spec import ResourceReqConfig

THREADS = 2

Prepare = Callable[[Mapping[str, ResourceReqConfig]], None]


class Prepared(NamedTuple):
    """``error``: what the work raised."""

    waiting: Waiting
    error: BaseException | None


class Preparing:
    """Does the work on at most two threads, first come first served.

    One thread calls everything.  Workers touch ``_jobs``, ``_done`` and ``_num_workers`` only, and end when there is
    nothing left to do; being daemons, they keep no process alive.
    """

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._requests: OrderedDict[int, Waiting] = OrderedDict()
        self._num_of: Counter[str] = Counter()  # by tenant
        self.num_tokens = 0
        self._lock = threading.Lock()  # of the three below
        self._jobs: OrderedDict[int, Mapping[str, ResourceReqConfig]] = OrderedDict()
        self._num_workers = 0
        self._done: deque[tuple[int, BaseException | None]] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Waiting]:
        """Those that are not ready yet, or were not taken, longest first; not to be changed meanwhile."""
        return iter(self._requests.values())

    def num_of(self, tenant: str) -> int:
        """How many of one tenant's."""
        return self._num_of[tenant]

    def add(self, waiting: Waiting) -> None:
        self._requests[waiting.request_id] = waiting
        self._num_of[waiting.request.tenant] += 1
        self.num_tokens += waiting.request.num_prompt_tokens
        with self._lock:
            self._jobs[waiting.request_id] = waiting.info.resource_configs
            if self._num_workers == THREADS:
                return
            self._num_workers += 1
        threading.Thread(target=self._work, name="mstar-prepare", daemon=True).start()

    def remove(self, request_id: int) -> Waiting | None:
        """Forgets a request; work that has begun goes on for nothing."""
        waiting = self._requests.pop(request_id, None)
        if waiting is not None:
            self.num_tokens -= waiting.request.num_prompt_tokens
            self._leave(waiting.request.tenant)
            with self._lock:
                self._jobs.pop(request_id, None)
        return waiting

    def take(self) -> Iterator[Prepared]:
        """Those that are ready, which leave."""
        while self._done:
            request_id, error = self._done.popleft()
            waiting = self.remove(request_id)
            if waiting is not None:
                yield Prepared(waiting, error)

    def _leave(self, tenant: str) -> None:
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._num_workers -= 1
                    return
                request_id, configs = self._jobs.popitem(last=False)
            error: BaseException | None = None
            try:
                self._prepare(configs)
            except BaseException as raised:  # a panic of a compiler written in Rust is no Exception
                error = raised
            self._done.append((request_id, error))
