"""How a device captures and replays a forward.  The runner's rules are the same over every backend."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mstar.engine import strict_mode
from mstar.engine.outputs import BatchedModelOutput

Forward = Callable[[Mapping[str, Any]], BatchedModelOutput]


class CapturedGraph(ABC):
    """One captured forward."""

    @abstractmethod
    def replay(self, tensors: Mapping[str, Any], bs: int) -> BatchedModelOutput:
        """Runs over the static buffers.  The outputs are valid until the next replay of any graph of the runner.

        ``tensors`` are views of the buffers recorded at capture, ``bs`` the padded rows.  A real graph has both
        recorded and ignores them; a backend that ``replays_real_head`` is handed shorter views and fewer rows.
        """


class GraphBackend(ABC):
    """Captures forwards on one kind of device.

    ``captures`` False serves everything eager.  ``capture_at_load`` False registers a bucket at load and lets its
    first replay capture it.  ``replays_real_head`` runs packed buckets over the real tokens without padding.
    ``warmup_forwards`` run before each capture at load.
    """

    captures: bool = True
    capture_at_load: bool = True
    replays_real_head: bool = False
    warmup_forwards: int = 2

    @abstractmethod
    def capture(self, forward: Forward, tensors: Mapping[str, Any], bs: int) -> CapturedGraph:
        """Captures ``forward`` over the static ``tensors`` of ``bs`` rows.

        Whatever it raises leaves the backend usable.
        """

    def compile(self, forward: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
        """The compiled form of a submodule's method; unchanged where compiling does not pay."""
        return forward

    def synchronize(self) -> None:
        """Waits for the device."""


class EagerBackend(GraphBackend):
    """For devices that cannot capture."""

    captures = False

    def capture(self, forward: Forward, tensors: Mapping[str, Any], bs: int) -> CapturedGraph:
        raise RuntimeError("this backend captures nothing")


class CpuGraphBackend(GraphBackend):
    """Keeps the whole protocol and replays by calling the captured callable over the static buffers.

    Defaults suit serving, where padding costs real work: no forward at load, packed replays over the real head.
    With ``strict``, host reads in a captured forward raise, every replay's operators are compared with the
    capture's, and outputs land in buffers that are poisoned before each replay, as a later replay would overwrite
    them on a device.
    """

    def __init__(
        self,
        *,
        warmup_forwards: int = 0,
        capture_at_load: bool = False,
        replays_real_head: bool = True,
        strict: bool = False,
    ) -> None:
        self.warmup_forwards = warmup_forwards
        self.capture_at_load = capture_at_load
        self.replays_real_head = replays_real_head
        self.strict = strict

    def capture(self, forward: Forward, tensors: Mapping[str, Any], bs: int) -> CapturedGraph:
        if not self.strict:
            return _CallableGraph(forward)
        graph = _StrictGraph(forward)
        if self.capture_at_load:
            graph.replay(tensors, bs)
        return graph


class _CallableGraph(CapturedGraph):
    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def replay(self, tensors: Mapping[str, Any], bs: int) -> BatchedModelOutput:
        return self._forward(tensors)


class _StrictGraph(CapturedGraph):
    """The first replay records the operators, input sizes and outputs that all later ones are held to."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._trace: list[strict_mode.OpRecord] | None = None
        self._sizes: list[int] = []
        self._outputs: dict[tuple[str, str], torch.Tensor] = {}

    def replay(self, tensors: Mapping[str, Any], bs: int) -> BatchedModelOutput:
        for buffer in self._outputs.values():
            _poison(buffer)
        result, trace = strict_mode.record(lambda: self._forward(tensors))
        sizes = [bs, *(n for t in tensors.values() if isinstance(t, torch.Tensor) for n in t.shape)]
        if self._trace is None:
            self._trace, self._sizes = trace, sizes
        else:
            strict_mode.compare(
                self._trace, trace, {pair for pair in zip(self._sizes, sizes, strict=True) if pair[0] != pair[1]}
            )
        return dataclasses.replace(
            result,
            row_outputs=self._into_buffers("row", result.row_outputs),
            check_stop_buffers=self._into_buffers("stop", result.check_stop_buffers),
        )

    def _into_buffers(self, kind: str, outputs: Mapping[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        for name, value in outputs.items():
            if not isinstance(value, torch.Tensor):
                copied[name] = value
                continue
            buffer = self._outputs.get((kind, name))
            if buffer is None or buffer.shape != value.shape:
                buffer = self._outputs[kind, name] = torch.empty_like(value)
            copied[name] = buffer.copy_(value)
        return copied


def _poison(buffer: torch.Tensor) -> None:
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
    elif buffer.dtype == torch.bool:
        buffer.fill_(True)
    else:
        buffer.fill_(torch.iinfo(buffer.dtype).min)
