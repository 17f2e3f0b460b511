"""The protocol of a node's network: what the engine calls in a step, in this order."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mstar.engine.inputs import ModelInputsFromEngine, NodeInputs, RequestInfo
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.resources.step import SlotLease, SubmoduleStep

if TYPE_CHECKING:
    from mstar.engine.accelerator_graph_config import AcceleratorGraphConfig, PiecewiseAcceleratorGraphConfig


class NodeSubmodule(nn.Module):
    """A node's network.  Hooks are per batch; nothing here may keep per-request state outside a resource.

    ``autocast_dtype`` None runs with autocast disabled.  ``supports_chunked_prefill``: a prompt may come in parts, cut
    by :meth:`split_inputs`, of which only the last one's draw is kept.
    """

    autocast_dtype: torch.dtype | None = None
    disable_torch_compile: bool = False
    reads_device_loopback: bool = False
    supports_chunked_prefill: bool = False

    def prepare_inputs(self, graph_walk: str, info: RequestInfo) -> NodeInputs | None:
        """One request's inputs; None skips it in this step, an exception fails that request only."""
        raise NotImplementedError(f"{type(self).__name__}.prepare_inputs")

    def uniform_row_inputs(self, graph_walk: str) -> NodeInputs | None:
        """One object that serves as every row's inputs (decode with its token on the device), or None."""
        return None

    def split_inputs(self, inputs: NodeInputs, num_tokens: int) -> tuple[NodeInputs, NodeInputs]:
        """One row's inputs cut in two: the first ``num_tokens`` tokens and the rest, neither of them empty."""
        raise NotImplementedError(f"{type(self).__name__}.split_inputs")

    def get_combined_graph_walks(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Node -> {combined walk: the walks whose rows one step of it may mix, in the order of its rows}."""
        return {}

    def can_batch(self, graph_walk: str, inputs: Sequence[NodeInputs]) -> bool:
        """Whether one forward may take these rows together; else each runs on its own."""
        return True

    def max_batch_size(self, graph_walk: str) -> int | None:
        """Most rows one step may have; None leaves it to the captures."""
        return None

    def chooses_capture(self, info: RequestInfo) -> bool:
        """Whether what :meth:`cg_key_info` and :meth:`eager_reason` say of a batch depends on this request being in it:
        they are told of no others.  Asked as the request comes (and comes back)."""
        return True

    def cg_key_info(self, graph_walk: str, infos: Sequence[RequestInfo]) -> Hashable | None:
        """What tells captures of one shape apart for this batch."""
        return None

    def eager_reason(self, graph_walk: str, infos: Sequence[RequestInfo]) -> str | None:
        """Why no capture can serve this batch (the label of the eager-step counter); None: one may."""
        return None

    def declare_step(
        self,
        graph_walk: str,
        request_ids: Sequence[int],
        inputs: Sequence[NodeInputs],
        slot_lease: SlotLease | None = None,
        piecewise_leases: Mapping[str, SlotLease] | None = None,
    ) -> SubmoduleStep | None:
        """What the step needs of each resource.  Pure: the same inputs give the same step."""
        return None

    def preprocess(
        self, graph_walk: str, engine_inputs: ModelInputsFromEngine, inputs: Sequence[NodeInputs]
    ) -> dict[str, Any]:
        """Collates the rows into named tensors: the forward's keywords, and the static buffers of a capture."""
        raise NotImplementedError(f"{type(self).__name__}.preprocess")

    def static_inputs(self, graph_walk: str) -> frozenset[str]:
        """Names of those tensors of :meth:`preprocess` that a resource keeps where the lease alone says, so that a
        capture reads them there instead of a copy."""
        return frozenset()

    def forward_batched(
        self, graph_walk: str, engine_inputs: ModelInputsFromEngine, **tensors: Any
    ) -> BatchedModelOutput | dict[Any, Any]:
        """The forward over all rows.  No host reads, no branches on tensor values, no ids."""
        raise NotImplementedError(f"{type(self).__name__}.forward_batched")

    def forward(
        self, graph_walk: str, engine_inputs: ModelInputsFromEngine, **tensors: Any
    ) -> BatchedModelOutput | dict[Any, Any]:
        """The forward over the one row of a batch that :meth:`can_batch` turned down."""
        return self.forward_batched(graph_walk, engine_inputs, **tensors)

    def filter_batched_output(
        self, graph_walk: str, request_id: int, outputs: Mapping[str, Sequence[Any]]
    ) -> Mapping[str, Sequence[Any]]:
        """Those of a request's own outputs that are worth a copy."""
        return outputs

    def unpack_packed_outputs(
        self,
        static_output: Mapping[str, Any],
        request_ids: Sequence[int],
        real_seq_lens: Sequence[int],
        inputs: Sequence[NodeInputs],
        per_request_info: Sequence[RequestInfo],
    ) -> dict[int, dict[str, list[Any]]]:
        """Cuts ``__name__`` outputs [tokens, ...] by the real rows' lengths; views will do, the engine copies them."""
        raise NotImplementedError(f"{type(self).__name__}.unpack_packed_outputs")

    def postprocess(self, graph_walk: str, info: RequestInfo, outputs: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """One request's routed outputs, completed.  Must not read tensor values; an exception fails that request."""
        return outputs

    def cleanup_request(self, request_id: int) -> None:
        """Frees what the submodule itself kept of a request."""

    def get_accelerator_graph_configs(self, device: torch.device) -> list[AcceleratorGraphConfig]:
        """Whole-forward captures of this node."""
        return []

    def get_piecewise_accelerator_graph_configs(
        self, device: torch.device
    ) -> dict[str, PiecewiseAcceleratorGraphConfig]:
        """Inner regions of this node's forward to capture, by label."""
        return {}


class ARNodeSubmodule(NodeSubmodule):
    """A node whose sampled token feeds its next step."""

    def device_loopback_signals(self, graph_walk: str) -> frozenset[str]:
        """Names of the loop-back inputs that stay on the device in this walk."""
        return frozenset()

    def loopback_outputs(self) -> dict[str, str]:
        """Loop-back input -> the row output that feeds it, for steps whose resources keep no token on the device."""
        return {}
