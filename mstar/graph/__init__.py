"""The walk graph: nodes, edges, loops, walks (names only, no tensors)."""
