"""What the conductor asks about an engine's nodes."""

from __future__ import annotations

from collections.abc import Mapping

from mstar.engine.node import EngineNode


class NodeQuestions:
    """The part of the engine that only answers, from what its nodes declare."""

    _nodes: Mapping[str, EngineNode]
    _dropped: dict[str, int]

    def max_batch_size(self, node: str, graph_walk: str) -> int | None:
        """Most rows of one step: the smaller of the submodule's bound and the captures'; None when neither says."""
        entry = self._nodes[node]
        bounds = (entry.submodule.max_batch_size(graph_walk), entry.runner.max_batch_size_for(graph_walk))
        return min((bound for bound in bounds if bound is not None), default=None)

    def packed_sizes(self, node: str, graph_walk: str) -> tuple[int, ...]:
        """Tokens that captured packed steps of this walk hold, ascending (more run eager); empty without such."""
        return self._nodes[node].runner.packed_sizes_for(graph_walk)

    def splits_prompts(self, node: str) -> bool:
        """Whether steps of this node may run parts of prompts."""
        return self._nodes[node].submodule.supports_chunked_prefill

    def combined_graph_walks(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Node -> {combined walk: constituents, in the order of its rows}, over all nodes."""
        combined: dict[str, dict[str, tuple[str, ...]]] = {}
        for entry in self._nodes.values():
            for node, walks in entry.submodule.get_combined_graph_walks().items():
                combined.setdefault(node, {}).update(walks)
        return combined

    def dropped_buckets(self) -> dict[str, int]:
        """Buckets that could not be captured, by node."""
        return dict(self._dropped)
