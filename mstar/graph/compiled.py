"""Walks as integer tables, made once at load, so that a step follows them with array look-ups."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mstar.graph.check import check_walk
from mstar.graph.walk import Loop, Node, Parallel, Section, Walk

END = -1  # next_state / exit_state: the walk is over
FORK = -2  # next_state / exit_state: several states follow, see ``successors``


class State(NamedTuple):
    """One node of one walk: where a request stands."""

    walk: str
    node: str


@dataclass(frozen=True)
class CompiledWalks:
    """Every (walk, node) is a state, an index into these arrays.

    After a step in state ``s`` a request goes to ``next_state[s]``, unless the step ended its loop: then to
    ``exit_state[s]``.  A step counts one iteration of ``loop_of[s]`` where ``ends_iteration[s]``; the loop ends when
    that count reaches ``max_iters[loop_of[s]]`` or the loop's stop signal was raised.  Outside loops, and before the
    end of a loop's body, both are the same.

    ==================  ==================  =====================================================================
    array               shape, dtype        meaning
    ==================  ==================  =====================================================================
    next_state          [states] int64      the state that follows (a loop's first, at its body's end); END, FORK
    exit_state          [states] int64      the same when the loop is over
    loop_of             [states] int64      index of the loop around the state, -1 outside loops
    ends_iteration      [states] bool       a step here completes one iteration of ``loop_of``
    num_predecessors    [states] int64      states that must be done before this one fires (joins: more than 1)
    max_iters           [loops] int64       iteration bound
    ==================  ==================  =====================================================================

    ``successors[s]`` lists what FORK stands for; ``stop_signals[loop]`` names the loop's signal.
    """

    walks: tuple[Walk, ...]
    states: tuple[State, ...]
    nodes: tuple[Node, ...]  # by state
    next_state: np.ndarray
    exit_state: np.ndarray
    loop_of: np.ndarray
    ends_iteration: np.ndarray
    num_predecessors: np.ndarray
    max_iters: np.ndarray
    stop_signals: tuple[str, ...]
    successors: tuple[tuple[int, ...], ...]
    starts: dict[str, tuple[int, ...]]

    def state_id(self, walk: str, node: str) -> int:
        """The state of ``node`` in ``walk``; KeyError naming both when there is none."""
        try:
            return self.states.index(State(walk, node))
        except ValueError:
            raise KeyError(f"walk {walk!r} has no node {node!r}") from None

    def first_states(self, walk: str) -> tuple[int, ...]:
        """Where a request enters a walk: one state, or several where it begins with Parallel; KeyError if unknown."""
        try:
            return self.starts[walk]
        except KeyError:
            raise KeyError(f"unknown walk {walk!r}, there are {sorted(self.starts)}") from None


def compile_walks(walks: Sequence[Walk], nodes: Collection[str] | None = None) -> CompiledWalks:
    """Checks the walks and turns them into tables.

    ``nodes``: the node names the model has; None accepts any.

    Raises:
        ValueError: names the walk and what is wrong with it: an unknown, repeated or missing node, an edge to an
            unknown node or to an input that its destination lacks, a cycle outside a loop, a nested loop, or a
            loop's bound, signal, ends or outputs.
    """
    builder = _Builder()
    for walk in walks:
        if walk.name in builder.starts:
            raise ValueError(f"walk {walk.name!r} is declared twice")
        check_walk(walk, nodes)
        firsts, _ = builder.add(walk.name, walk.root)
        builder.starts[walk.name] = tuple(firsts)
    return builder.finish(walks)


@dataclass
class _Builder:
    """``after[s]``: states that follow s going forward.  ``back[s]``: first states of the loop whose body s ends."""

    states: list[State] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    loop_of: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    back: list[list[int]] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    starts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, walk: str, section: Section, loop: int = -1) -> tuple[list[int], list[int]]:
        """Adds a section; returns the states it begins and ends with."""
        if isinstance(section, Node):
            self.states.append(State(walk, section.name))
            self.nodes.append(section)
            self.loop_of.append(loop)
            self.after.append([])
            self.back.append([])
            return [len(self.states) - 1], [len(self.states) - 1]
        if isinstance(section, Loop):
            self.loops.append(section)
            firsts, lasts = self.add(walk, section.body, len(self.loops) - 1)
            if len(firsts) > 1 or len(lasts) > 1:  # or an iteration would be counted once per branch
                raise ValueError(
                    f"walk {walk!r}: loop {section.stop_signal!r} must begin and end with one node, not with Parallel"
                )
            self.back[lasts[0]] = firsts
            return firsts, lasts
        parts = [self.add(walk, part, loop) for part in section.sections]
        if isinstance(section, Parallel):
            return [s for firsts, _ in parts for s in firsts], [s for _, lasts in parts for s in lasts]
        for (_, lasts), (firsts, _) in itertools.pairwise(parts):
            for state in lasts:
                self.after[state] = list(firsts)
        return parts[0][0], parts[-1][1]

    def finish(self, walks: Sequence[Walk]) -> CompiledWalks:
        follow = [back or after for back, after in zip(self.back, self.after, strict=True)]
        predecessors = np.zeros(len(self.states), dtype=np.int64)
        for after in self.after:
            predecessors[after] += 1
        return CompiledWalks(
            walks=tuple(walks),
            states=tuple(self.states),
            nodes=tuple(self.nodes),
            next_state=_single(follow),
            exit_state=_single(self.after),
            loop_of=np.array(self.loop_of, dtype=np.int64),
            ends_iteration=np.array([bool(back) for back in self.back], dtype=bool),
            num_predecessors=predecessors,
            max_iters=np.array([loop.max_iters for loop in self.loops], dtype=np.int64),
            stop_signals=tuple(loop.stop_signal for loop in self.loops),
            successors=tuple(map(tuple, follow)),
            starts=self.starts,
        )


def _single(follow: list[list[int]]) -> np.ndarray:
    return np.array([END if not f else f[0] if len(f) == 1 else FORK for f in follow], dtype=np.int64)
