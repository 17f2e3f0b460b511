"""Loop-back values that no resource keeps: the engine holds each request's last one by reference, on the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch

from mstar.engine.inputs import NodeInputs
from mstar.engine.outputs import BatchedModelOutput


class KeptOutputs:
    """Last value of every loop-back output of one node, by request: views [1, ...] of one copy per step.

    Values stay on the device, so a step may be launched before the last one's tokens have reached the host.
    """

    def __init__(self, inputs: Mapping[str, str]) -> None:
        """``inputs``: name of the input that takes a value -> name of the row output it comes from."""
        self.inputs = dict(inputs)
        self._values: dict[str, dict[int, torch.Tensor]] = {name: {} for name in self.inputs}

    def keep(self, request_ids: Sequence[int], output: BatchedModelOutput) -> int:
        """Takes the step's values, row i for request i; returns how many rows were kept."""
        kept = 0
        for name, source in self.inputs.items():
            value = output.row_outputs.get(source, output.check_stop_buffers.get(source))
            if isinstance(value, torch.Tensor):
                rows = value[: len(request_ids)].clone()  # the next replay overwrites the original
                self._values[name].update(zip(request_ids, rows.split(1), strict=True))
                kept = len(request_ids)
        return kept

    def attach(self, request_id: int, row: NodeInputs, names: Sequence[str]) -> NodeInputs:
        """A copy of the row's inputs with the request's kept values among its tensors.

        Raises:
            KeyError: no step has made a value for this request.
        """
        row = copy.copy(row)
        row.tensors = {**row.tensors, **{name: self._value(request_id, name) for name in names}}
        return row

    def forget(self, request_id: int) -> None:
        """Drops a request's values."""
        for values in self._values.values():
            values.pop(request_id, None)

    def _value(self, request_id: int, name: str) -> torch.Tensor:
        value = self._values[name].get(request_id)
        if value is None:
            raise KeyError(f"request {request_id} has no {self.inputs[name]!r} to loop back as {name!r}")
        return value
