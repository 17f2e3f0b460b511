"""The walk graph: nodes, edges, loops, walks, and their integer tables.  Names only, no tensors."""

from mstar.graph.compiled import END, FORK, CompiledWalks, State, compile_walks
from mstar.graph.walk import EMIT_TO_CLIENT, EMPTY_DESTINATION, Edge, Loop, Node, Parallel, Sequential, Walk

__all__ = [
    "EMIT_TO_CLIENT",
    "EMPTY_DESTINATION",
    "END",
    "FORK",
    "CompiledWalks",
    "Edge",
    "Loop",
    "Node",
    "Parallel",
    "Sequential",
    "State",
    "Walk",
    "compile_walks",
]
