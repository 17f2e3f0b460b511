"""What can be wrong with a walk, refused at load with the name of the culprit."""

from __future__ import annotations

from collections.abc import Collection

from mstar.graph.walk import EMIT_TO_CLIENT, EMPTY_DESTINATION, Edge, Loop, Node, Parallel, Section, Walk, nodes_of


def check_walk(walk: Walk, known_nodes: Collection[str] | None = None) -> None:
    """Raises ValueError naming the walk and its first fault; ``known_nodes`` None accepts any node name."""
    where = f"walk {walk.name!r}"
    _check_section(where, walk.root, inside_loop=False)
    nodes: dict[str, Node] = {}
    for node in nodes_of(walk.root):
        if node.name in nodes:
            raise ValueError(f"{where}: node {node.name!r} appears twice")
        if known_nodes is not None and node.name not in known_nodes:
            raise ValueError(f"{where}: unknown node {node.name!r}, the model has {sorted(known_nodes)}")
        nodes[node.name] = node
    before, loops = _order(walk.root)
    for node in nodes.values():
        for edge in node.outputs:
            _check_edge(where, node, edge, nodes)
            if edge.dest in nodes and not _flows_forward(node.name, edge.dest, before, loops):
                raise ValueError(
                    f"{where}: edge {node.name!r} -> {edge.dest!r} ({edge.tensor!r}) is a cycle outside a loop"
                )


def _check_section(where: str, section: Section, inside_loop: bool) -> None:
    if isinstance(section, Node):
        return
    if isinstance(section, Loop):
        name = f"{where}: loop {section.stop_signal!r}"
        if inside_loop:
            raise ValueError(f"{name} lies inside another loop")
        if section.max_iters < 1:
            raise ValueError(f"{name}: max_iters must be >= 1, got {section.max_iters}")
        if not section.stop_signal:
            raise ValueError(f"{where}: a loop needs a stop_signal")
        both = set(section.outputs) & set(section.accumulated_outputs)
        if both:
            raise ValueError(f"{name}: {sorted(both)} are both outputs and accumulated_outputs")
        made = {edge.tensor for node in nodes_of(section.body) for edge in node.outputs}
        for tensor in (*section.outputs, *section.accumulated_outputs):
            if tensor not in made:
                raise ValueError(f"{name}: no node of its body makes output {tensor!r}")
        _check_section(where, section.body, inside_loop=True)
        return
    if not section.sections:
        raise ValueError(f"{where}: an empty {type(section).__name__}")
    for part in section.sections:
        _check_section(where, part, inside_loop)


def _check_edge(where: str, node: Node, edge: Edge, nodes: dict[str, Node]) -> None:
    what = f"{where}: edge {node.name!r} -> {edge.dest!r} ({edge.tensor!r})"
    if edge.output_modality is not None and edge.dest != EMIT_TO_CLIENT:
        raise ValueError(f"{what} has an output_modality but does not go to the client")
    if edge.dest == EMIT_TO_CLIENT:
        return
    if edge.dest == EMPTY_DESTINATION:
        if not edge.persist:
            raise ValueError(f"{what} goes nowhere and is not persisted")
    elif edge.dest not in nodes:
        raise ValueError(f"{what}: the walk has no such node")
    elif edge.tensor not in nodes[edge.dest].inputs:
        raise ValueError(f"{what}: {edge.dest!r} has no such input, only {sorted(nodes[edge.dest].inputs)}")


def _order(root: Section) -> tuple[dict[str, set[str]], dict[str, int]]:
    """Which nodes are done before each node, and the loop each lies in."""
    before: dict[str, set[str]] = {}
    loops: dict[str, int] = {}

    def visit(section: Section, earlier: set[str], loop: int) -> set[str]:
        """Returns the nodes of the section."""
        if isinstance(section, Node):
            before[section.name] = set(earlier)
            loops[section.name] = loop
            return {section.name}
        if isinstance(section, Loop):
            return visit(section.body, earlier, id(section))
        own: set[str] = set()
        for part in section.sections:
            own |= visit(part, earlier if isinstance(section, Parallel) else earlier | own, loop)
        return own

    visit(root, set(), 0)
    return before, loops


def _flows_forward(source: str, dest: str, before: dict[str, set[str]], loops: dict[str, int]) -> bool:
    in_one_loop = loops[source] != 0 and loops[source] == loops[dest]
    return in_one_loop or source in before[dest]
