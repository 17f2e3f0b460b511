"""Ways to run rows: each walk's node by itself, and combined walks that take rows of several walks in one step."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from mstar.conductor.protocols import StepEngine
from mstar.conductor.transitions import Transitions
from mstar.graph import State
from mstar.utils.errors import LoadError


@dataclass(frozen=True)
class Lane:
    """One (walk, node) that a step can be.

    ``states``: whose rows it takes, in the step's row order; one state for a plain walk.  ``walks``: the rows' own
    walks, by state.  ``max_rows``: most rows of a step; None is no bound.  ``token_sizes``: tokens that captured steps
    of ragged rows hold, ascending; empty where there are none.  ``splits_prompts``: a step may have a part of a prompt.
    """

    node: str
    walk: str
    states: tuple[int, ...]
    walks: tuple[str, ...]
    max_rows: int | None
    token_sizes: tuple[int, ...] = ()
    splits_prompts: bool = False

    def tokens_left(self, taken: int, wanted: int) -> int:
        """Of ``wanted`` tokens, how many may stand beside ``taken`` ones in a captured step."""
        return min(wanted, self.token_sizes[-1] - taken) if self.token_sizes else wanted

    def tokens_that_fill(self, taken: int, wanted: int) -> int:
        """As :meth:`tokens_left`, less what would make the step a size larger than it fills."""
        most = self.tokens_left(taken, wanted)
        sizes = self.token_sizes
        filled = bisect.bisect_right(sizes, taken + most) - 1
        return sizes[filled] - taken if filled >= 0 and sizes[filled] > taken else most


def plain_lanes(transitions: Transitions, engine: StepEngine, splits_prompts: bool) -> list[Lane]:
    """The lane of every state, in their order; ``splits_prompts``: where the node can."""
    return [
        _lane(engine, node, walk, (index,), (walk,), splits_prompts)
        for index, (walk, node) in enumerate(transitions.states)
    ]


def combined_lanes(transitions: Transitions, engine: StepEngine, splits_prompts: bool) -> list[Lane]:
    """The lanes of the combined walks that the nodes declare: rows of one token each, then prompts.

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
            lanes.append(_lane(engine, node, walk, states, tuple(parts), splits_prompts))
    return lanes


def _lane(
    engine: StepEngine, node: str, walk: str, states: tuple[int, ...], walks: tuple[str, ...], splits_prompts: bool
) -> Lane:
    splits = splits_prompts and engine.splits_prompts(node)
    sizes = tuple(engine.packed_sizes(node, walk))
    return Lane(node, walk, states, walks, engine.max_batch_size(node, walk), sizes, splits)
