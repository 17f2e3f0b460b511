"""State of running requests as arrays over the engine's master rows."""

from __future__ import annotations

import numpy as np

from mstar.conductor.deadlines import NEVER
from mstar.conductor.queue import Waiting
from mstar.conductor.row_counts import RowCounts, RowFlags, RowMarks

IDLE = -1  # the state of a row that no step can run


class RowTable:
    """One entry per master row [capacity]; filled when a request joins, cleared when it leaves.

    ``state``: where the request's next step is, from what was launched so far; IDLE without a request, and when its
    last token was launched.  ``rounds``: of the loop it is in.  ``limit``: most tokens it may generate.
    ``issued``: tokens whose step was launched, ``generated``: those that came to the host.  ``prompt_size``: tokens of
    its prompt.  ``prompt_left``: of those that are run as a prompt, less ``cached_tokens``, how many no launched step
    has brought; ``prompt_at``: where they begin.  ``is_held``: sits out steps until another request leaves.
    ``is_constrained``: its parameters bar tokens.  ``waits_for_host``: its next step needs its last token on the host.
    ``follows``: sits out steps until another row has brought pages of its prompt.
    ``joined``: counts the requests that got a row, so it tells who did first.
    ``last_step``: number of the step that ran it last, -1 before its first.  ``stop_ids`` [capacity, most per request],
    padded with -1.  ``priority``: of the request.  ``deadline_ns``: when it must end.  ``asks_logprobs``: of its
    tokens, and ``num_logprobs`` how many of the most likely; ``asks_prompt``: of its prompt, and
    ``num_prompt_logprobs``; these numbers say nothing where it does not ask.  ``history``
    int32 [capacity, most tokens]: what it generated; None where nobody asks (:meth:`keep_history`).  ``heard``: by row,
    what was told of its prompt in steps that did not bring the end of it.  ``num_left``
    counts departures; ``version`` moves with every change of which rows are ready for what.
    """

    def __init__(self, capacity: int) -> None:
        self.request_id = np.full(capacity, -1, np.int64)
        self.client = np.zeros(capacity, np.int64)
        self.ticket = np.zeros(capacity, np.int64)
        self.state = np.full(capacity, IDLE, np.int64)
        self.rounds = RowCounts(capacity)
        self.prompt_left = np.zeros(capacity, np.int64)
        self.prompt_at = np.zeros(capacity, np.int64)
        self.cached_tokens = np.zeros(capacity, np.int64)
        self.issued = RowCounts(capacity)
        self.generated = RowCounts(capacity)
        self.limit = np.zeros(capacity, np.int64)
        self.ignore_eos = np.zeros(capacity, bool)
        self.is_held = np.zeros(capacity, bool)
        self.is_constrained = np.zeros(capacity, bool)
        self.waits_for_host = RowFlags(capacity)
        self.follows = RowFlags(capacity)
        self.coming_tokens = np.zeros(capacity, np.int64)  # of a follower's prompt, that others bring
        self.joined = np.zeros(capacity, np.int64)
        self.last_step = RowMarks(capacity)
        self.stop_ids = np.full((capacity, 0), -1, np.int64)
        self.deadline_ns = np.full(capacity, NEVER, np.int64)
        self.asks_logprobs = RowFlags(capacity)
        self.num_logprobs = np.full(capacity, -1, np.int64)
        self.asks_prompt = RowFlags(capacity)
        self.num_prompt_logprobs = np.full(capacity, -1, np.int64)
        self.infos = np.full(capacity, None, object)  # of RequestInfo
        self.row_of: dict[int, int] = {}
        self.priority = np.zeros(capacity, np.int64)
        self.prompt_size = np.zeros(capacity, np.int64)
        self.history: np.ndarray | None = None
        self.heard: dict[int, list[np.ndarray]] = {}
        self.num_left = 0
        self.version = 0
        self._has_held = False
        self._num_joined = 0
        self._ahead = (-1, 0)  # what prompt_tokens_ahead found at this version

    @property
    def num_running(self) -> int:
        return len(self.row_of)

    def ready_states(self) -> np.ndarray:
        """int64 [capacity]: ``state``, IDLE also where a row is held, follows or waits for the host; read only."""
        states = np.where(self.is_held, IDLE, self.state) if self._has_held else self.state
        if self.waits_for_host.count:
            waits = self.waits_for_host.values & (self.issued.values > self.generated.values)
            states = np.where(waits, IDLE, states)
        if self.follows.count:
            states = np.where(self.follows.values, IDLE, states)
        return states

    def prompt_tokens_ahead(self) -> int:
        """Tokens of prompts that no launched step has brought, of rows that can run, and of followers what nobody else
        will bring."""
        version, ahead = self._ahead
        if version != self.version:
            left = self.prompt_left
            ahead = int(left[self.ready_states() != IDLE].sum())
            if self.follows.count:
                follows = self.follows.values & (self.state != IDLE)
                ahead += int((left[follows] - self.coming_tokens[follows]).sum())
            self._ahead = self.version, ahead
        return ahead

    def is_any_generating(self) -> bool:
        """Whether steps are waited for by a row whose prompt is done."""
        return bool(np.count_nonzero((self.state != IDLE) & (self.prompt_left == 0)))

    def join(self, waiting: Waiting, state: int) -> None:
        """Writes a request into the row the engine gave it."""
        row, request, info = waiting.info.row, waiting.request, waiting.info
        self.request_id[row] = waiting.request_id
        self.client[row] = waiting.client
        self.ticket[row] = waiting.ticket
        self.state[row] = state
        self.rounds.values[row] = 0
        self.prompt_left[row] = request.num_prompt_tokens - info.cached_tokens
        self.prompt_at[row] = self.cached_tokens[row] = info.cached_tokens
        self.issued.values[row] = 0
        self.generated.values[row] = 0
        self.limit[row] = waiting.limit
        self.ignore_eos[row] = request.ignore_eos
        self.is_constrained[row] = request.bars_tokens
        self.waits_for_host.write(row, request.guide is not None)
        if request.deadline_ns:
            self.deadline_ns[row] = request.deadline_ns
        if request.num_logprobs >= 0:
            self.asks_logprobs.write(row, True)
            self.num_logprobs[row] = request.num_logprobs
        if request.num_prompt_logprobs >= 0:
            self.asks_prompt.write(row, True)
            self.num_prompt_logprobs[row] = request.num_prompt_logprobs
        self.priority[row] = request.request_priority
        self.prompt_size[row] = request.num_prompt_tokens
        self.joined[row] = self._num_joined
        self._num_joined += 1
        self.last_step.values[row] = -1
        self._write_stop_ids(row, request.stop_ids)
        self.infos[row] = info
        self.row_of[waiting.request_id] = row
        self._bump(request.num_prompt_tokens - info.cached_tokens)

    def follow(self, row: int, coming_tokens: int) -> None:
        """A row that has not run yet sits out steps from now on, since others bring so much of its prompt."""
        self.follows.write(row, True)
        self.coming_tokens[row] = coming_tokens
        self._bump(-coming_tokens)

    def go_on(self, row: int) -> None:
        """A row that sat out steps does no longer."""
        self.follows.write(row, False)
        self.version += 1

    def found(self, row: int, cached_tokens: int) -> None:
        """Of the prompt of a row that has not run yet, so many tokens are cached by now."""
        self.prompt_left[row] += self.prompt_at[row] - cached_tokens
        self.prompt_at[row] = self.cached_tokens[row] = cached_tokens
        self.version += 1

    def bring(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """A step with ``tokens`` int64 [n] of the prompts of rows int64 [n] was launched."""
        self.prompt_left[rows] -= tokens
        self.prompt_at[rows] += tokens
        self.version += 1

    def launched(self, rows: np.ndarray) -> None:
        """A step was launched that draws a token of rows int64 [n]."""
        self.issued.raise_by_one(rows)
        if self.waits_for_host.count:
            self.version += 1

    def landed(self, rows: np.ndarray) -> None:
        """The tokens of rows int64 [n] came to the host."""
        self.generated.raise_by_one(rows)
        if self.waits_for_host.count:
            self.version += 1

    def keep_history(self, most_tokens: int) -> None:
        """From now on :meth:`record` has room for as many generated tokens per row."""
        self.history = np.zeros((self.request_id.size, most_tokens), np.int32)  # memory as it is written to

    def record(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """The tokens int64 [n] that have landed last of rows int64 [n]."""
        if self.history is not None:
            self.history[rows, self.generated.values[rows] - 1] = tokens

    def come_back(self, row: int, state: int, num_tokens: int, cached_tokens: int) -> None:
        """A row that gave its pages up runs all ``num_tokens`` that it has as a prompt."""
        self.state[row] = state
        self.prompt_left[row] = num_tokens - cached_tokens
        self.prompt_at[row] = self.cached_tokens[row] = cached_tokens
        self.rounds.values[row] = 0
        self.version += 1

    def move(self, rows: np.ndarray, states: np.ndarray | int) -> None:
        """Rows int64 [n] stand elsewhere in their walks, or nowhere (IDLE)."""
        self.state[rows] = states
        self.version += 1

    def hold(self, rows: np.ndarray) -> None:
        """Rows sit out until somebody leaves."""
        self.is_held[rows] = self._has_held = True
        self.version += 1

    def release_held(self) -> None:
        """Held rows may try again: something was freed."""
        if self._has_held:
            self.is_held[:] = self._has_held = False
            self.version += 1

    def leave(self, row: int) -> None:
        """Clears a row.  Held rows may try again: something was freed."""
        del self.row_of[int(self.request_id[row])]
        self.request_id[row] = -1
        self.state[row] = IDLE
        self.infos[row] = None
        self.heard.pop(row, None)
        self.deadline_ns[row] = NEVER
        for flags in (self.waits_for_host, self.follows, self.asks_logprobs, self.asks_prompt):
            flags.write(row, False)
        self.release_held()
        self.num_left += 1
        self.version += 1
        if not self.row_of:
            self.stop_ids = self.stop_ids[:, :0]  # most traffic has none: the check costs nothing then

    def _bump(self, more_ahead: int) -> None:
        """Something changed that makes the prompt tokens ahead so many more."""
        version, ahead = self._ahead
        if version == self.version:
            self._ahead = version + 1, ahead + more_ahead
        self.version += 1

    def _write_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        if not stop_ids and not self.stop_ids.shape[1]:
            return
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stop_ids)] = stop_ids
