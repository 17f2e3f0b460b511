"""The thin layer over ``triton_python_backend_utils``, which only exists inside Triton's Python stub."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

from mstar.serving import contract
from mstar.serving.chunks import Chunk, tensors_of
from mstar.serving.parse import RawRequest
from mstar.utils.errors import ErrorCode, MstarError

logger = logging.getLogger(__name__)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Arrival(NamedTuple):
    """A request that Triton handed over: what was copied out of it, where its answer goes, and when it came."""

    raw: RawRequest
    reply: TritonReply
    monotonic_ns: int


class TritonReply:
    """The response side of one request; exactly one ``fail`` or ``send(final=True)`` ends it.

    A sender lives in the server until its final response: asking it for cancellation must not overlap that, which
    is what the lock is for.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._wanted = frozenset(request.requested_output_names())
        self._ending = threading.Lock()
        self._is_over = False

    def send(self, chunks: Sequence[Chunk], *, final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in tensors_of(chunks, self._wanted).items()]
        response = pb_utils.InferenceResponse(output_tensors=tensors)
        if final:
            self._end(response)
        else:
            self._sender.send(response)

    def fail(self, code: ErrorCode, message: str) -> None:
        self._end(pb_utils.InferenceResponse(error=triton_error(code, message)))

    def is_cancelled(self) -> bool:
        with self._ending:
            return not self._is_over and self._sender.is_cancelled()

    def _end(self, response: Any) -> None:
        with self._ending:
            if self._is_over:
                return
            self._is_over = True
            self._sender.send(response, flags=FINAL)


def triton_error(code: ErrorCode, message: str) -> Any:
    """The server's error of our code; servers that do not know a code get the nearest older one."""
    known = pb_utils.TritonError
    return known(message, getattr(known, code.value, known.INTERNAL))


def read_request(request: Any) -> RawRequest:
    """Copy a request out of shared memory, which is only valid until ``execute`` returns."""
    tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
    return RawRequest(tensors, request.parameters(), request.request_id())


def answer_error(reply: TritonReply, error: Exception) -> None:
    """End a request with the error that reading or submitting it raised; whatever is not ours is INTERNAL."""
    if not isinstance(error, MstarError):
        logger.error("a request failed unexpectedly", exc_info=error)
        reply.fail(ErrorCode.INTERNAL, f"unexpected {type(error).__name__} while the request was read")
    else:
        reply.fail(error.code, str(error))


def complete_config(config: Any) -> Any:
    """Put the contract into the model configuration, as config.pbtxt has it already."""
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})
    for entry in contract.input_configs():
        config.add_input(entry)
    for entry in contract.output_configs():
        config.add_output(entry)
    return config
