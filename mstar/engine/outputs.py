"""What a batched forward returns, and how it is told apart by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mstar.engine.inputs import NodeInputs, RequestInfo
    from mstar.engine.submodule import NodeSubmodule

RequestOutputs = dict[int, dict[str, list[Any]]]  # request id -> {name: [values]}


@dataclass
class BatchedModelOutput:
    """Outputs of one forward over a batch.

    ``row_outputs``: name -> [bs, ...] tensors, row i belonging to batch row i.  ``per_rid_outputs``: request id ->
    {name: [tensors]}.  ``packed_outputs``: ``__name__`` -> [tokens, ...], cut per request after the replay.
    ``check_stop_buffers``: name -> [bs, ...], read by the stop check with one copy to the host;
    ``row_request_ids`` are their rows' requests, stamped by the engine.
    """

    per_rid_outputs: RequestOutputs = field(default_factory=dict)
    row_outputs: dict[str, Any] = field(default_factory=dict)
    packed_outputs: dict[str, Any] = field(default_factory=dict)
    check_stop_buffers: dict[str, Any] = field(default_factory=dict)
    row_request_ids: tuple[int, ...] = ()

    @classmethod
    def coerce(cls, output: BatchedModelOutput | Mapping[Any, Any]) -> BatchedModelOutput:
        """A plain dict becomes an output: keys ``__name__`` are packed, all others are request ids."""
        if isinstance(output, cls):
            return output
        if not isinstance(output, Mapping):
            raise TypeError(f"a forward returns BatchedModelOutput or a dict, got {type(output).__name__}")
        packed = {k: v for k, v in output.items() if isinstance(k, str) and k.startswith("__") and k.endswith("__")}
        return cls(per_rid_outputs={k: v for k, v in output.items() if k not in packed}, packed_outputs=packed)

    @property
    def is_rows_only(self) -> bool:
        """Whether nothing here is routed per request: the stop check's rows are all there is."""
        return not (self.row_outputs or self.per_rid_outputs or self.packed_outputs)


def split_by_request(
    output: BatchedModelOutput,
    submodule: NodeSubmodule,
    graph_walk: str,
    infos: Sequence[RequestInfo],
    seq_lens: Sequence[int],
    inputs: Sequence[NodeInputs],
    captured: bool,
) -> RequestOutputs:
    """Every real request's routed outputs, in tensors that the next replay leaves alone.

    Row outputs are copied once per batch and handed out as ``[i:i+1]`` views; values without rows pass through.  A
    per-request entry of the same name wins.  In a captured step the i-th entry belongs to request i, whatever padding
    id it was captured under.

    Args:
        infos, seq_lens, inputs: of the real rows, in the forward's order.
    """
    ids = [info.request_id for info in infos]
    split: RequestOutputs = {request_id: {} for request_id in ids}
    for name, value in output.row_outputs.items():
        if isinstance(value, torch.Tensor) and value.dim():
            rows = value[: len(ids)].clone()
            for i, request_id in enumerate(ids):
                split[request_id][name] = [rows[i : i + 1]]
        else:
            for request_id in ids:
                split[request_id][name] = [value]
    entries = output.per_rid_outputs
    if captured:
        entries = dict(zip(ids, entries.values(), strict=False))
    _merge(split, entries, submodule, graph_walk)
    if output.packed_outputs:
        cut = submodule.unpack_packed_outputs(output.packed_outputs, ids, list(seq_lens), inputs, list(infos))
        _merge(split, cut, submodule, graph_walk)
    return split


def _merge(
    split: RequestOutputs,
    entries: Mapping[int, Mapping[str, Sequence[Any]]],
    submodule: NodeSubmodule,
    graph_walk: str,
) -> None:
    for request_id, own in split.items():
        entry = entries.get(request_id)
        if entry:
            for name, values in submodule.filter_batched_output(graph_walk, request_id, entry).items():
                own[name] = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
