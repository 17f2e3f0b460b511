"""Where a request goes after a step: the walks' tables, joined over walk ends by the model's order of walks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mstar.graph import END, FORK, CompiledWalks, State
from mstar.utils.errors import LoadError

DONE = -1


class Transitions:
    """Integer tables over states.  ``entry_state`` is where every request starts."""

    def __init__(self, walks: CompiledWalks, next_walk: Callable[[str | None], str | None]) -> None:
        """
        Args:
            next_walk: the walk after a finished one (None: the first), None when the request is done.

        Raises:
            LoadError: a walk begins with or contains parallel branches, or ``next_walk`` names an unknown walk.
        """
        self.states: tuple[State, ...] = walks.states
        first = next_walk(None)
        if first is None:
            raise LoadError("the model names no first walk")
        self.entry_state = _enter(walks, first)
        self._next = _join(walks, walks.next_state, next_walk)
        self._exit = _join(walks, walks.exit_state, next_walk)
        in_loop = walks.loop_of >= 0
        self._ends_iteration = walks.ends_iteration
        self._max_iters = np.full(len(self.states), np.iinfo(np.int64).max)
        self._max_iters[in_loop] = walks.max_iters[walks.loop_of[in_loop]]
        self._stays = in_loop & (self._next >= 0) & (walks.loop_of[self._next] == walks.loop_of)  # in the same loop
        self._repeats = (self._stays & (self._next == np.arange(len(self.states))) & (self._exit == DONE)).tolist()

    def repeats(self, state: int) -> bool:
        """Whether a request that steps in the state stays there until it is done, as in a text model's decode."""
        return self._repeats[state]

    def rounds_left(self, state: int, rounds: np.ndarray) -> np.ndarray:
        """Rounds until a request is done that has been through ``rounds`` int64 [n] of a repeating state."""
        return self._max_iters[state] - rounds

    def advance(self, states: np.ndarray, iterations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """States and loop rounds after a step in ``states`` [n]; ``DONE`` where the last walk is over."""
        ends = self._ends_iteration[states]
        rounds = iterations + ends
        after, stays = self._next[states], self._stays[states]
        is_over = ends & (rounds >= self._max_iters[states])
        if np.count_nonzero(is_over):
            after[is_over] = self._exit[states[is_over]]
            stays &= ~is_over
        return after, rounds * stays


def _join(walks: CompiledWalks, table: np.ndarray, next_walk: Callable[[str | None], str | None]) -> np.ndarray:
    joined = table.copy()
    for state in range(len(walks.states)):
        if table[state] == FORK:
            raise LoadError(f"walk {walks.states[state].walk!r} has parallel branches, which cannot be scheduled")
        if table[state] == END:
            following = next_walk(walks.states[state].walk)
            joined[state] = DONE if following is None else _enter(walks, following)
    return joined


def _enter(walks: CompiledWalks, walk: str) -> int:
    try:
        firsts = walks.first_states(walk)
    except KeyError as error:
        raise LoadError(f"walks: {error.args[0]}") from None
    if len(firsts) > 1:
        raise LoadError(f"walk {walk!r} begins with parallel branches, which cannot be scheduled")
    return firsts[0]
