"""A loaded model, as the engine and the conductor see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.submodule import NodeSubmodule
from mstar.graph import Walk


@dataclass(frozen=True)
class EngineModel:
    """Nodes with their weights, the resources they share, and the walks a request takes through them.

    ``max_seq_len`` is in tokens, prompt plus output.  ``num_parameters`` and ``weight_bytes`` count each weight of
    the model once.  ``walk_order`` is the sequence of walks of every request.
    """

    name: str
    submodules: dict[str, NodeSubmodule]
    resource_specs: list[NodeResourceSpec]
    walks: list[Walk]
    walk_order: tuple[str, ...]
    vocab_size: int
    max_seq_len: int
    eos_ids: frozenset[int]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_parameters: int
    weight_bytes: int

    def next_walk(self, finished: str | None) -> str | None:
        """The walk after ``finished``; the first for None; None when the request has taken them all.

        Raises:
            ValueError: ``finished`` is no walk of this model.
        """
        if finished is None:
            return self.walk_order[0]
        if finished not in self.walk_order:
            raise ValueError(f"unknown walk {finished!r}, there are {self.walk_order}")
        position = self.walk_order.index(finished) + 1
        return self.walk_order[position] if position < len(self.walk_order) else None
