"""How a device captures and replays a forward.  The runners' rules are the same over every backend."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.capture_memory import MemoryUse
from mstar.engine.outputs import BatchedModelOutput
from mstar.utils import knobs

Forward = Callable[[Mapping[str, Any]], BatchedModelOutput]


class CapturedGraph(ABC):
    """One captured forward."""

    @abstractmethod
    def replay(self, tensors: Mapping[str, Any], bs: int) -> BatchedModelOutput:
        """Runs over the static buffers.  The outputs are valid until the next replay of any graph of the runner.

        ``tensors`` are views of the buffers recorded at capture, ``bs`` the padded rows.  A real graph has both
        recorded and ignores them; a backend that ``replays_real_head`` is handed shorter views and fewer rows.
        """


class HostCopy(ABC):
    """Tensors on their way to the host."""

    @abstractmethod
    def wait(self) -> dict[str, np.ndarray]:
        """The values, by name, once they are there: arrays of their own.  Once per copy."""


class GraphBackend(ABC):
    """Captures forwards on one kind of device.

    ``captures`` False serves everything eager.  ``capture_at_load`` False registers a bucket at load and lets its
    first replay capture it.  ``replays_real_head`` runs packed buckets over the real tokens without padding.
    ``warmup_forwards`` run before each capture at load.  ``compiles``: configurations that ask for it are compiled.
    ``budgets_memory``: captures keep free what an eager step needs.
    """

    captures: bool = True
    capture_at_load: bool = True
    replays_real_head: bool = False
    warmup_forwards: int = 2
    compiles: bool = False
    budgets_memory: bool = False

    @abstractmethod
    def capture(self, forward: Forward, tensors: Mapping[str, Any], bs: int, pool: Any | None = None) -> CapturedGraph:
        """Captures ``forward`` over the static ``tensors`` of ``bs`` rows, its memory coming from ``pool``.

        Whatever it raises leaves the backend usable.
        """

    def make_pool(self) -> Any | None:
        """Memory that several captures share, for replays that never overlap."""
        return None

    def capturing(self) -> AbstractContextManager[Any]:
        """Where a bucket's preparation, warm-up and capture run."""
        return nullcontext()

    def compile(self, forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
        """The compiled form of a captured method, of one static shape per bucket; unchanged unless ``compiles``."""
        if not self.compiles:
            return forward
        options: dict[str, Any] = {} if mode == "default" else {"mode": mode}
        return torch.compile(forward, fullgraph=False, dynamic=False, **options)

    def synchronize(self) -> None:
        """Waits for the device."""

    def failure(self) -> str | None:
        """Why the device can run nothing more, in its own words; None while it can.  Waits for the device, so it is
        asked only after something failed."""
        return None

    def measure(self, forward: Callable[[], Any]) -> MemoryUse:
        """Runs ``forward`` and says what device memory it took; asked only where the backend ``budgets_memory``."""
        raise NotImplementedError(f"{type(self).__name__} budgets no memory")

    def free_memory(self) -> int:
        """Bytes free on the device; asked as :meth:`measure` is."""
        raise NotImplementedError(f"{type(self).__name__} budgets no memory")

    def copy_to_host(self, tensors: Mapping[str, torch.Tensor]) -> HostCopy:
        """Starts copying; whatever the device is given next may overwrite the tensors."""
        return _HostArrays({name: _to_numpy(tensor) for name, tensor in tensors.items()})


class EagerBackend(GraphBackend):
    """For devices that cannot capture."""

    captures = False

    def capture(self, forward: Forward, tensors: Mapping[str, Any], bs: int, pool: Any | None = None) -> CapturedGraph:
        raise RuntimeError("this backend captures nothing")


class CpuGraphBackend(GraphBackend):
    """Keeps the whole protocol and replays by calling the captured callable over the static buffers.

    Defaults suit serving, where padding costs real work: no forward at load, packed replays over the real head,
    nothing compiled.  With ``strict`` (None: MSTAR_GRAPH_STRICT), what a real graph would freeze raises: host reads
    in a captured forward, and replays whose operators, constants or addresses differ from the capture's.  Outputs
    then land in buffers that are poisoned before each replay, as a later replay would overwrite them on a device.
    """

    def __init__(
        self,
        *,
        warmup_forwards: int = 0,
        capture_at_load: bool = False,
        replays_real_head: bool = True,
        compiles: bool = False,
        strict: bool | None = None,
    ) -> None:
        self.warmup_forwards = warmup_forwards
        self.capture_at_load = capture_at_load
        self.replays_real_head = replays_real_head
        self.compiles = compiles
        self.strict = knobs.graph_strict() if strict is None else strict

    def capture(self, forward: Forward, tensors: Mapping[str, Any], bs: int, pool: Any | None = None) -> CapturedGraph:
        if not self.strict:
            return _CallableGraph(forward)
        graph = _StrictGraph(forward)
        if self.capture_at_load:
            with strict_mode.no_recompilation():
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
            packed_outputs=self._into_buffers("packed", result.packed_outputs),
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


class _HostArrays(HostCopy):
    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def wait(self) -> dict[str, np.ndarray]:
        return self._arrays


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy on the host; NumPy has no bfloat16, which becomes float32."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.numpy().copy() if tensor.is_cpu else tensor.cpu().numpy()


def _poison(buffer: torch.Tensor) -> None:
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
    elif buffer.dtype == torch.bool:
        buffer.fill_(True)
    else:
        buffer.fill_(torch.iinfo(buffer.dtype).min)
