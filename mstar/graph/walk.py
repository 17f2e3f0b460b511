"""The walk graph as a model declares it: nodes, edges, and how sections compose.  Names only, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

EMIT_TO_CLIENT = "@client"  # destination of a tensor that is sent to the client
EMPTY_DESTINATION = "@parked"  # destination of a persisted tensor that no node of this walk reads


@dataclass(frozen=True)
class Edge:
    """A possible output of a node: tensor ``tensor`` for node ``dest``, named as ``dest`` names its input.

    ``persist`` keeps it for a later walk of the request; ``output_modality`` (text, image, audio, video, action)
    belongs to edges towards the client.
    """

    dest: str
    tensor: str
    persist: bool = False
    output_modality: str | None = None


@dataclass(frozen=True)
class Node:
    """A unit of compute in a walk.  Nodes of one name in several walks share weights and state."""

    name: str
    inputs: Sequence[str] = ()
    outputs: Sequence[Edge] = ()


@dataclass(frozen=True, init=False)
class Sequential:
    """Sections one after the other."""

    sections: tuple[Section, ...]

    def __init__(self, *sections: Section) -> None:
        object.__setattr__(self, "sections", sections)


@dataclass(frozen=True, init=False)
class Parallel:
    """Sections in any order; what follows waits for all of them."""

    sections: tuple[Section, ...]

    def __init__(self, *sections: Section) -> None:
        object.__setattr__(self, "sections", sections)


@dataclass(frozen=True)
class Loop:
    """``body`` again and again, at most ``max_iters`` times or until ``stop_signal`` is raised for a request.

    Edges from the body to an earlier node of the body feed the next iteration.  ``outputs`` names tensors of the
    last iteration, ``accumulated_outputs`` those with one entry per iteration, given once at the end.
    """

    body: Section
    max_iters: int
    stop_signal: str
    outputs: Sequence[str] = ()
    accumulated_outputs: Sequence[str] = ()


Section = Node | Sequential | Parallel | Loop


@dataclass(frozen=True)
class Walk:
    """A named path through a model's nodes, such as ``prefill`` or ``decode``."""

    name: str
    root: Section


def nodes_of(section: Section) -> Iterator[Node]:
    """The nodes of a section, in declared order."""
    if isinstance(section, Node):
        yield section
    elif isinstance(section, Loop):
        yield from nodes_of(section.body)
    else:
        for part in section.sections:
            yield from nodes_of(part)
