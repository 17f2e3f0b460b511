"""What a batched forward returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class BatchedModelOutput:
    """Outputs of one forward over a batch.

    ``row_outputs``: name -> [bs, ...] tensors, row i belonging to batch row i.  ``per_rid_outputs``: request id ->
    {name: [tensors]}.  ``packed_outputs``: ``__name__`` -> [tokens, ...], cut per request after the replay.
    ``check_stop_buffers``: name -> [bs, ...], read by the stop check with one copy to the host.
    """

    per_rid_outputs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    row_outputs: dict[str, Any] = field(default_factory=dict)
    packed_outputs: dict[str, Any] = field(default_factory=dict)
    check_stop_buffers: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def coerce(cls, output: BatchedModelOutput | Mapping[Any, Any]) -> BatchedModelOutput:
        """A plain dict becomes an output: keys ``__name__`` are packed, all others are request ids."""
        if isinstance(output, cls):
            return output
        if not isinstance(output, Mapping):
            raise TypeError(f"a forward returns BatchedModelOutput or a dict, got {type(output).__name__}")
        packed = {k: v for k, v in output.items() if isinstance(k, str) and k.startswith("__") and k.endswith("__")}
        return cls(per_rid_outputs={k: v for k, v in output.items() if k not in packed}, packed_outputs=packed)
