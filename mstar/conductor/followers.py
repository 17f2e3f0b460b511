"""Rows whose prompt begins as one that is being computed: they wait for its pages instead of computing them again."""

from __future__ import annotations

from typing import NamedTuple

from mstar.conductor.counters import Counters
from mstar.conductor.departures import Departures
from mstar.conductor.pools import Pools
from mstar.conductor.protocols import StepEngine
from mstar.conductor.report import Outbox
from mstar.conductor.rows import IDLE, RowTable
from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.kv.prefix.coming import Coming

LEAST_TOKENS = 64  # to be spared: a step of fewer takes hardly longer, and who waits waits for a step
MOST_TURNS = 3  # of one request, each for another row


class _Follower(NamedTuple):
    """``turns``: times that it waited, this one included."""

    row: int
    request_id: int
    turns: int


class Followers:
    """Rows that sit out steps until the pages they lack are in the prefix index, and then start behind them.

    A follower waits for the last of the pages that it shares with one prompt.  They come with the steps in which that
    prompt stands before its own, so it loses a step at most, if there was room for both; and when that row leaves,
    gives its pages up or cannot run, the follower goes on at once.  Rows that are waited for can run, so none waits
    for itself.  Order, rows and reservations are those of everybody.
    """

    def __init__(
        self,
        engine: StepEngine,
        table: RowTable,
        pools: Pools,
        departures: Departures,
        counters: Counters,
        outbox: Outbox,
    ) -> None:
        self._engine = engine
        self._table = table
        self._pools = pools
        self._departures = departures
        self._counters = counters
        self._outbox = outbox
        self._waiting: dict[bytes, list[_Follower]] = {}  # by the key of the page they wait for

    def __len__(self) -> int:
        return len(self._waiting)

    def coming_of(self, info: RequestInfo) -> Coming | None:
        """What a request that is about to join, or has a row and has not run yet, had better wait for."""
        prefixes = self._pools.prefixes
        coming = None if prefixes is None else prefixes.coming(self._pools.prefix_config(info), info.row)
        if coming is None or self._pools.prefix_tokens(coming.num_pages) < LEAST_TOKENS:
            return None
        return coming if self._can_run(coming.row) else None

    def add(self, info: RequestInfo, coming: Coming, turns: int = 1) -> None:
        """The request, which has a row, waits."""
        self._table.follow(info.row, self._pools.prefix_tokens(coming.num_pages))
        self._waiting.setdefault(coming.key, []).append(_Follower(info.row, info.request_id, turns))

    def go_on(self) -> None:
        """Starts those whose pages have come, or will not."""
        prefixes = self._pools.prefixes
        assert prefixes is not None
        for key in [*self._waiting]:
            row = prefixes.row_bringing(key)
            if row is None or not self._can_run(row):
                for follower in self._waiting.pop(key):
                    if self._table.row_of.get(follower.request_id) == follower.row:
                        self._start(follower)

    def _can_run(self, row: int) -> bool:
        return bool(self._table.ready_states()[row] != IDLE)

    def _start(self, follower: _Follower) -> None:
        table, row = self._table, follower.row
        info, before = table.infos[row], table.cached_tokens[row]
        table.go_on(row)
        if table.state[row] == IDLE:  # it gave its pages up, and looks for others as it comes back
            return
        try:
            self._engine.resume(info, info.prompt_ids, info.resource_configs, False)
        except Exception as error:
            self._departures.fail(row, error)
            return
        table.found(row, info.cached_tokens)
        self._counters.cached_prompt_tokens += info.cached_tokens - int(before)
        self._outbox.add_cached(info.cached_tokens - int(before))
        coming = self.coming_of(info) if follower.turns < MOST_TURNS else None
        if coming is not None:
            self.add(info, coming, follower.turns + 1)
