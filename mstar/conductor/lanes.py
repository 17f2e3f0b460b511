"""Ways to run rows: each walk's node by itself, and combined walks that take rows of several walks in one step."""

from __future__ import annotations

from dataclasses import dataclass

from mstar.conductor.protocols import StepEngine
from mstar.conductor.transitions import Transitions
from mstar.graph import State
from mstar.utils.errors import LoadError


@dataclass(frozen=True)
class Lane:
    """One (walk, node) that a step can be.

    ``states``: whose rows it takes, in the step's row order; one state for a plain walk.  ``walks``: the rows' own
    walks, by state.  ``max_rows``: most rows of a step.  ``max_tokens``: most tokens of a captured step of ragged
    rows.  None is no bound.
    """

    node: str
    walk: str
    states: tuple[int, ...]
    walks: tuple[str, ...]
    max_rows: int | None
    max_tokens: int | None


def plain_lanes(transitions: Transitions, engine: StepEngine) -> list[Lane]:
    """The lane of every state, in their order."""
    return [_lane(engine, node, walk, (index,), (walk,)) for index, (walk, node) in enumerate(transitions.states)]


def combined_lanes(transitions: Transitions, engine: StepEngine) -> list[Lane]:
    """The lanes of the combined walks that the nodes declare: rows of one token each, then whole prompts.

    Raises:
        LoadError: a combined walk of an unknown walk, or whose last part, and no other, is not where requests start.
    """
    lanes = []
    for node, walks in engine.combined_graph_walks().items():
        for walk, parts in walks.items():
            for part in parts:
                if State(part, node) not in transitions.states:
                    raise LoadError(f"combined walk {walk!r}: {node!r} has no walk {part!r}")
            states = tuple(transitions.states.index(State(part, node)) for part in parts)
            if len(states) < 2 or states[-1] != transitions.entry_state or transitions.entry_state in states[:-1]:
                raise LoadError(f"combined walk {walk!r} of {node!r}: its last part must be the walk requests start in")
            lanes.append(_lane(engine, node, walk, states, tuple(parts)))
    return lanes


def _lane(engine: StepEngine, node: str, walk: str, states: tuple[int, ...], walks: tuple[str, ...]) -> Lane:
    return Lane(node, walk, states, walks, engine.max_batch_size(node, walk), engine.max_packed_tokens(node, walk))
