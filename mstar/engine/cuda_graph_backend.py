"""CUDA graphs: capture on a stream of its own into a shared pool, replay on the caller's stream."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.accelerator_graph_backend import CapturedGraph, Forward, GraphBackend, HostCopy
from mstar.engine.capture_memory import MemoryUse
from mstar.engine.outputs import BatchedModelOutput


class CudaGraphBackend(GraphBackend):
    """Captures every bucket at load, after warm-up forwards on the capture stream, and keeps memory free for eager
    steps.  One thread captures; replays and host copies are issued on the caller's current stream.
    """

    compiles = True
    budgets_memory = True

    def __init__(self, device: torch.device, *, warmup_forwards: int = 2, compiles: bool = True) -> None:
        self.warmup_forwards = warmup_forwards
        self.compiles = compiles
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)  # launches go to the thread's current device
        self._stream = torch.cuda.Stream(self._device)
        self._kept: list[torch.cuda.CUDAGraph] = []  # graphs whose end would take something else with them
        self._pinned = _PinnedBuffers()

    def make_pool(self) -> Any:
        return _Pool(self._new_handle())

    def _new_handle(self) -> Any:
        """A pool that outlives its graphs: were a failed capture the last to leave, the next could not enter it."""
        handle, anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the anchor's graph is empty
            anchor.capture_begin(pool=handle, capture_error_mode="thread_local")
            anchor.capture_end()
        self._kept.append(anchor)
        return handle

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        try:
            # Warm-ups run here too: libraries keep a workspace per stream, which must not lie in a graph's pool.
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def capture(self, forward: Forward, tensors: Mapping[str, Any], bs: int, pool: Any | None = None) -> CapturedGraph:
        pool = self.make_pool() if pool is None else pool
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a pool cannot draw on what the allocator keeps for others
        with torch.cuda.stream(self._stream), _no_algorithm_search(), strict_mode.no_recompilation():
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                output = forward(tensors)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what went wrong first is the error to report
                    self._end(graph, pool)
                raise
            self._end(graph, pool)
        return _CudaGraph(graph, output)

    def _end(self, graph: torch.cuda.CUDAGraph, pool: _Pool) -> None:
        """Ends a capture.  One that fails leaves its pool for good, so that later captures get a new one.

        torch 2.11 raises there before it takes its allocators off the pool.  The device's can be taken off here;
        the one of page-locked memory cannot, refuses the pool from then on, and keeps asking the graph.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            self._kept.append(graph)
            with contextlib.suppress(RuntimeError):  # a torch that took them off itself
                torch._C._cuda_endAllocateToPool(self._device.index, pool.handle)
                torch._C._cuda_releasePool(self._device.index, pool.handle)
            pool.handle = self._new_handle()
            raise

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def failure(self) -> str | None:
        """A fault of a kernel, such as an illegal address, is told by every call from then on: nothing but a new
        process gets the device back.  An error that is told once, such as too little memory, is none."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)  # told once, it is gone now
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return None

    def measure(self, forward: Callable[[], Any]) -> MemoryUse:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        forward()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - allocated
        # Growth misses what the allocator returned to the driver in between; a graph's pool holds the peak at least.
        return MemoryUse(peak=peak, reserved=max(torch.cuda.max_memory_reserved(self._device) - reserved, peak))

    def free_memory(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return free

    def copy_to_host(self, tensors: Mapping[str, torch.Tensor]) -> HostCopy:
        """Copies are queued on the current stream, ahead of the next replay, which overwrites the tensors."""
        return _PinnedCopy(tensors, self._pinned, torch.cuda.current_stream(self._device))


@dataclass
class _Pool:
    """Memory that graphs share."""

    handle: Any


class _CudaGraph(CapturedGraph):
    def __init__(self, graph: torch.cuda.CUDAGraph, output: BatchedModelOutput) -> None:
        self._graph = graph
        self._output = output

    def replay(self, tensors: Mapping[str, Any], bs: int) -> BatchedModelOutput:
        self._graph.replay()
        return self._output


class _PinnedBuffers:
    """Page-locked tensors for reuse: allocating one synchronises the device.  Sizes are rounded up to powers of 2."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        size = 1 << max(numel - 1, 0).bit_length()
        free = self._free[dtype, size]
        return free.pop() if free else torch.empty(size, dtype=dtype, pin_memory=True)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free[buffer.dtype, buffer.numel()].append(buffer)


class _PinnedCopy(HostCopy):
    def __init__(self, tensors: Mapping[str, torch.Tensor], buffers: _PinnedBuffers, stream: torch.cuda.Stream) -> None:
        self._buffers = buffers
        self._parts: list[tuple[str, torch.Tensor, torch.Size]] = []
        for name, tensor in tensors.items():
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.float()  # NumPy has no such type
            buffer = buffers.take(tensor.dtype, tensor.numel())
            buffer[: tensor.numel()].view(tensor.shape).copy_(tensor, non_blocking=True)
            self._parts.append((name, buffer, tensor.shape))
        self._done = torch.cuda.Event(blocking=False)
        self._done.record(stream)

    def wait(self) -> dict[str, np.ndarray]:
        self._done.synchronize()
        host = {name: buffer[: shape.numel()].view(shape).numpy().copy() for name, buffer, shape in self._parts}
        for _, buffer, _ in self._parts:
            self._buffers.give_back(buffer)
        self._parts.clear()
        return host


@contextlib.contextmanager
def _no_algorithm_search() -> Iterator[None]:
    """cuDNN's benchmark mode times kernels, which a capture forbids."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
