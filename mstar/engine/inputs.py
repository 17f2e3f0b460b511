"""What a submodule is handed for one step: rows' inputs and the engine's side of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mstar.engine.piecewise_graph_runner import PiecewiseGraphRunner
    from mstar.engine.resources.spec import ResourceReqConfig
    from mstar.engine.resources.step import StepContext


@dataclass
class RequestInfo:
    """What the engine knows of one request.  Written at ingest by the conductor's thread, then read only.

    ``request_id`` is the engine's own integer: real >= 0, padding <= -2, -1 unset.  ``row`` is its master row.
    """

    request_id: int
    row: int = -1
    prompt_ids: np.ndarray | None = None  # int64 [prompt tokens]
    max_tokens: int = 1
    cached_tokens: int = 0  # leading prompt tokens that a prefix cache supplied; set at ingest
    resource_configs: Mapping[str, ResourceReqConfig] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)  # non-text inputs of the request, by input name
    is_resumed: bool = False  # prompt_ids holds what it generated before, too; written as it comes back

    @cached_property
    def needs_full_variant(self) -> bool:
        """Whether some resource needs the ``full`` variant of a captured step for this request."""
        return any(config.needs_full_variant for config in self.resource_configs.values())


@dataclass
class NodeInputs:
    """One row's inputs to a node.  ``input_seq_len`` tokens are added; it drives bucket choice and spans."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    input_seq_len: int = 1


@dataclass
class ARNodeInputs(NodeInputs):
    """One row's inputs to an autoregressive node.

    ``input_ids`` int64 [input_seq_len], or None when the row's token lies on the device (the sampler's last
    token).  A prompt given in chunks carries where the chunk starts and whether it is the last.  ``is_resumed``: its
    tokens were run before and are only to be run again: nothing counts them.
    """

    input_ids: torch.Tensor | None = None
    input_embeds: torch.Tensor | None = None
    walk: str | None = None
    chunk_start: int = 0
    chunk_total: int = 0
    is_final_chunk: bool = True
    is_resumed: bool = False


@dataclass
class ModelInputsFromEngine:
    """The engine's side of a forward: padded rows, the resources by key, and the step's context.

    ``piecewise``: runners of the node's captured regions, by label; a region without any graph has none, and its
    code runs as it is.  A region with an entry in
    ``ctx.piecewise_leases`` owns the resources that the step's declaration left out.
    """

    request_ids: tuple[int, ...]
    resources: dict[str, Any]
    ctx: StepContext
    per_request_info: Sequence[RequestInfo] = ()
    captured: bool = False
    piecewise: Mapping[str, PiecewiseGraphRunner] = field(default_factory=dict)
