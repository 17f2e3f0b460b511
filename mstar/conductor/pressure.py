"""What happens when running requests need more pages than there are: some give theirs up, and come back later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from mstar.conductor.counters import Counters
from mstar.conductor.departures import Departures
from mstar.conductor.pools import Pools
from mstar.conductor.protocols import StepEngine
from mstar.conductor.rows import IDLE, RowTable
from mstar.conductor.way_back import WayBack
from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.kv.config import KVReqConfig
from mstar.engine.resources.spec import ResourceReqConfig


class _Away(NamedTuple):
    """A request without pages.

    ``state`` it was in; ``num_tokens`` of its prompt and what it generated.  ``is_offloaded``: its pages wait on the
    host, and it will go on where it was.
    """

    row: int
    state: int
    num_tokens: int
    is_offloaded: bool


class Pressure:
    """Requests that gave up their pages.  They keep their rows, and whatever no page holds: draws, penalties, grammars.

    Who goes has the lowest priority, and is the newest of these; the oldest of the highest priority never goes.  Who
    comes back is the first by the same order, once there is room for all its tokens and a page for each row that runs,
    so that nobody comes back only to go again.  Its pages wait on the host, where there is room and that costs less
    (:class:`~mstar.conductor.way_back.WayBack`), and it goes on bit for bit; else its tokens are run as a prompt, less
    what the prefix cache still holds of them.  Nobody new joins until all are back.
    """

    def __init__(
        self,
        engine: StepEngine,
        table: RowTable,
        pools: Pools,
        departures: Departures,
        counters: Counters,
        entry_state: int,
        way_back: WayBack,
        clock: Callable[[], int],
    ) -> None:
        """``clock`` tells the nanoseconds that moving pages takes."""
        self._engine = engine
        self._table = table
        self._pools = pools
        self._departures = departures
        self._counters = counters
        self._entry_state = entry_state
        self._way_back = way_back
        self._clock = clock
        self._away: dict[int, _Away] = {}  # by request id

    def __len__(self) -> int:
        return len(self._away)

    def give_way(self, rows: np.ndarray) -> bool:
        """Of rows int64 [n] that run, none of them in a step in flight, one gives its pages up, or ends with the error
        that this brought; False where neither can be: there is nobody else, or nothing kept what they generated."""
        table = self._table
        if rows.size < 2:
            return False
        order = np.lexsort((-table.request_id[rows], table.priority[rows]))
        row = int(rows[order[0]])
        info = table.infos[row]
        num_tokens = int(table.prompt_size[row] + table.generated.values[row])
        try:
            is_offloaded = (table.history is None or self._way_back.is_host()) and self._offload(info, num_tokens)
        except Exception as error:
            self._departures.fail(row, error)
            table.release_held()
            return True
        if not is_offloaded:
            if table.history is None:
                return False
            self._engine.release(info)
        self._away[int(table.request_id[row])] = _Away(row, int(table.state[row]), num_tokens, is_offloaded)
        table.move(np.array([row]), IDLE)
        table.release_held()
        self._counters.preemptions += 1
        self._counters.offloads += is_offloaded
        return True

    def come_back(self, is_anyone_in_flight: bool) -> None:
        """Lets requests run again, as far as there is room."""
        table = self._table
        self._away = {key: away for key, away in self._away.items() if table.row_of.get(key) == away.row}
        for request_id in sorted(self._away, key=self._rank):
            away = self._away[request_id]
            num_running = np.count_nonzero(table.state != IDLE)
            is_alone = not num_running and not is_anyone_in_flight
            if not is_alone and not self._pools.have_room(away.num_tokens + 1, int(num_running)):
                return
            if not away.is_offloaded:
                self._recompute(away)
            elif not self._go_on(away):
                return
            del self._away[request_id]

    def _go_on(self, away: _Away) -> bool:
        """False where its pages find no place yet."""
        try:
            if not self._reload(self._table.infos[away.row], away.num_tokens):
                return False
        except Exception as error:
            self._departures.fail(away.row, error)
        else:
            self._table.move(np.array([away.row]), away.state)
        return True

    def _offload(self, info: RequestInfo, num_tokens: int) -> bool:
        start = self._clock()
        is_offloaded = self._engine.offload(info)
        if is_offloaded:
            self._way_back.moved(num_tokens, self._clock() - start, False)
        return is_offloaded

    def _reload(self, info: RequestInfo, num_tokens: int) -> bool:
        start = self._clock()
        is_back = self._engine.reload(info)
        if is_back:
            self._way_back.moved(num_tokens, self._clock() - start, True)
        return is_back

    def _rank(self, request_id: int) -> tuple[int, int]:
        return -int(self._table.priority[self._away[request_id].row]), request_id

    def _recompute(self, away: _Away) -> None:
        table, row = self._table, away.row
        info, made = table.infos[row], int(table.generated.values[row])
        assert table.history is not None
        tokens = np.concatenate((info.prompt_ids[: table.prompt_size[row]], table.history[row, :made]))
        configs = _with_prompt(info.resource_configs, tokens, int(table.limit[row]) - made)
        try:
            self._engine.resume(info, tokens, configs, made > 0)
        except Exception as error:
            self._departures.fail(row, error)
            return
        ran = tokens.size if made else int(table.prompt_at[row])
        again = ran - info.cached_tokens
        self._counters.recomputed_tokens += max(again, 0)
        self._counters.cached_prompt_tokens += max(-again, 0)  # that others brought meanwhile
        if not made:
            table.heard.pop(row, None)  # it is told of again
        table.come_back(row, self._entry_state, tokens.size, info.cached_tokens)


def _with_prompt(
    configs: Mapping[str, ResourceReqConfig], tokens: np.ndarray, max_tokens: int
) -> dict[str, ResourceReqConfig]:
    return {
        key: dataclasses.replace(config, prompt_tokens=tokens.size, prompt_ids=tokens, max_tokens=max_tokens)
        if isinstance(config, KVReqConfig)
        else config
        for key, config in configs.items()
    }
