"""How requests get their rows: those that wait, and those that need not."""

from __future__ import annotations

from mstar.conductor.counters import Counters
from mstar.conductor.departures import Departures
from mstar.conductor.followers import Followers
from mstar.conductor.joining import Joining
from mstar.conductor.lobby import Lobby
from mstar.conductor.pace import Pace
from mstar.conductor.parameters import RefusedParameter
from mstar.conductor.pools import Pools
from mstar.conductor.pressure import Pressure
from mstar.conductor.protocols import StepEngine
from mstar.conductor.queue import Limits, Waiting
from mstar.conductor.report import Outbox
from mstar.conductor.rows import RowTable
from mstar.utils.errors import ErrorCode, Unavailable

PROMPT_STEPS = 2  # whose prompts rows may hold: the next one's, and those of the one that is launched behind it


class Entrance:
    """Lets requests in while rows, pages and the next steps' room for prompts last."""

    def __init__(
        self,
        engine: StepEngine,
        table: RowTable,
        lobby: Lobby,
        pools: Pools,
        followers: Followers,
        pressure: Pressure,
        departures: Departures,
        counters: Counters,
        outbox: Outbox,
        limits: Limits,
        pace: Pace | None,
        entry_state: int,
    ) -> None:
        self._engine = engine
        self._table = table
        self._lobby = lobby
        self._pools = pools
        self._joining = Joining(lobby.queue, pools)
        self._followers = followers
        self._pressure = pressure
        self._departures = departures
        self._counters = counters
        self._outbox = outbox
        self._num_rows = table.request_id.size
        self._step_tokens = limits.max_batch_tokens
        self._pace = pace if limits.chunked_prefill else None
        self._entry_state = entry_state

    def has_prompt_room(self) -> bool:
        """Whether the prompts of rows leave room in the next steps: who joined beyond that would only wait in a row,
        where priorities and shares count no more."""
        of_step = self._step_tokens
        if self._pace is not None and self._table.is_any_generating():
            of_step = min(of_step, self._pace.prompt_tokens)
        return self._table.prompt_tokens_ahead() < PROMPT_STEPS * of_step

    def let_in(self) -> None:
        """Moves those that wait into rows, in their order."""
        while len(self._lobby.queue) and self._is_open():
            waiting = self._joining.next()
            if waiting is None or not self._enter(waiting):
                return

    def admits_at_once(self, waiting: Waiting) -> bool:
        """Gives a request its row that comes while nobody waits, and need not itself; whether it did (or ended it)."""
        if len(self._lobby) or not self._is_open():
            return False
        configs = waiting.info.resource_configs
        if any(config.needs_preparation for config in configs.values()) or not self._pools.can_join(configs):
            return False
        return self._enter(waiting)

    def _is_open(self) -> bool:
        """Whether rows and the next steps' prompts leave room, and nobody who gave pages up goes first."""
        return self._table.num_running < self._num_rows and not len(self._pressure) and self.has_prompt_room()

    def _enter(self, waiting: Waiting) -> bool:
        """Gives a request its row, or ends it with what is wrong with it; False where there is no row after all."""
        info, queue = waiting.info, self._lobby.queue
        coming = self._followers.coming_of(info)
        self._engine.clock.mark("join")
        try:
            self._engine.ingest(info)
        except Unavailable:
            return False
        except Exception as error:  # a ValueError is a resource's word on the request's parameters
            queue.remove(waiting.request_id)
            if isinstance(error, ValueError):
                self._departures.fail_unrun(waiting, ErrorCode.INVALID_ARG, str(RefusedParameter(error)))
            else:
                self._departures.fail_unrun(waiting, ErrorCode.INTERNAL, str(error))
            return True
        self._engine.clock.mark("ingest")
        queue.join(waiting, 0 if coming is None else self._pools.prefix_tokens(coming.num_pages))
        self._table.join(waiting, self._entry_state)
        if coming is not None:
            self._followers.add(info, coming)
        self._counters.prompt_tokens += waiting.request.num_prompt_tokens
        self._counters.cached_prompt_tokens += info.cached_tokens
        self._outbox.add_cached(info.cached_tokens)
        self._engine.clock.mark("join")
        return True
