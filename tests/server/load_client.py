"""Many clients in one asyncio loop, each with a gRPC stream of its own, and the times of all that they got."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import grpc
import numpy as np
from golden import board, wait_idle
from raw_stream import bytes_content, request
from serving_client import Answer, ServerProcess, add_response
from tritonclient.grpc import InferResult, service_pb2_grpc

from mstar.runtime.board import Slot
from mstar.serving.contract import INPUT_BY_NAME

NUM_CONNECTIONS = 8  # that the clients of a crowd share
REAL_STATUS = (("triton_grpc_error", "true"),)  # an error ends the stream with its status


class Call:
    """One request.  It is read from the moment it is made, so that ``times`` are those of arrival.

    ``times``: seconds on the monotonic clock, one per response; ``tokens``: how many each brought; ``ended``: when the
    server closed the stream; ``status``: what it closed it with.
    """

    def __init__(self, stub: Any, message: Any) -> None:
        self.answer = Answer()
        self.times: list[float] = []
        self.ended: float | None = None
        self.status: grpc.StatusCode | None = None
        self._has_left = False
        self.sent = time.monotonic()
        self._stream = stub.ModelStreamInfer(iter([message]), metadata=REAL_STATUS)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Up to the end of the stream, so that whatever follows a final response is seen too."""
        try:
            async for response in self._stream:
                self.times.append(time.monotonic())
                add_response(self.answer, InferResult(response.infer_response))
        except grpc.aio.AioRpcError as error:
            self.answer.error = error.details()
        except asyncio.CancelledError:
            if not self._has_left:  # grpc tells of a cancel of the call as asyncio does of one of the task
                raise
            self.answer.error = "cancelled by this client"
        self.ended = time.monotonic()
        self.status = await self._stream.code()

    @property
    def is_over(self) -> bool:
        return self._reader.done()

    @property
    def tokens(self) -> list[int]:
        return self.answer.counts

    @property
    def gaps(self) -> list[float]:
        """Seconds between one response and the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def seconds(self) -> float:
        """From sending to the end of the stream; only once it is over."""
        assert self.ended is not None
        return self.ended - self.sent

    async def end(self, timeout_s: float = 120) -> Answer:
        await asyncio.wait_for(self._reader, timeout_s)
        return self.answer

    def cancel(self) -> bool:
        """Leave; whether there was anything to leave."""
        self._has_left = True
        return bool(self._stream.cancel())


def wire_tensor(name: str, value: Any) -> tuple[str, list[int], bytes]:
    """An input as ``raw_stream.request`` takes it, in the contract's dtype and rank."""
    spec = INPUT_BY_NAME[name]
    items = value if spec.is_list else [value]
    if spec.dtype == "STRING":
        return "BYTES", [len(items)], bytes_content(*(item.encode() for item in items))
    return spec.dtype, [len(items)], np.array(items, spec.numpy_type).tobytes()


class Crowd:
    """Clients of one model."""

    def __init__(self, server: ServerProcess, model: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # else all channels would share one connection
        self._model = model
        self._channels = [grpc.aio.insecure_channel(server.grpc_address, options) for _ in range(NUM_CONNECTIONS)]
        self._stubs = itertools.cycle([service_pb2_grpc.GRPCInferenceServiceStub(made) for made in self._channels])

    def send(self, inputs: Mapping[str, Any], request_id: str = "") -> Call:
        tensors = {name: wire_tensor(name, value) for name, value in inputs.items()}
        return Call(next(self._stubs), request(self._model, request_id, empty_final=True, **tensors))

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for channel in self._channels:
            await channel.close()


async def until(is_so: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.002)


def counters_at_rest(server: ServerProcess) -> np.ndarray:
    """The engine's counters by ``Slot``, once nothing runs or waits; it writes them one by one, so they must stand."""
    wait_idle(server)
    before, now = None, board(server).values.copy()
    while before is None or (np.delete(before, Slot.BEAT_NS) != np.delete(now, Slot.BEAT_NS)).any():
        time.sleep(0.1)  # longer than an idle engine's turn
        before, now = now, board(server).values.copy()
    return now
