"""ModelStreamInfer as bytes on the wire: for what tritonclient hides or refuses to send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
from serving_client import ServerProcess
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor


def bytes_content(*items: bytes) -> bytes:
    """A BYTES tensor's content: each item after its length."""
    return serialize_byte_tensor(np.array(items, dtype=np.object_)).item() if items else b""


def request(
    model: str, request_id: str = "", empty_final: bool = False, **inputs: tuple[str, Sequence[int], bytes]
) -> Any:
    """A request whose inputs are ``name=(datatype, shape, content)``."""
    made = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    made.parameters["triton_enable_empty_final_response"].bool_param = empty_final
    for name, (datatype, shape, content) in inputs.items():
        made.inputs.add(name=name, datatype=datatype, shape=list(shape))
        made.raw_input_contents.append(content)
    return made


def exchange(server: ServerProcess, requests: Sequence[Any], timeout_s: float = 30) -> list[Any]:
    """Send all requests on one stream and return every ModelStreamInferResponse until the server ends it."""
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return list(stub.ModelStreamInfer(iter(requests), timeout=timeout_s))


def is_final(response: Any) -> bool:
    return bool(response.infer_response.parameters["triton_final_response"].bool_param)


def outputs(response: Any) -> dict[str, Any]:
    """Output tensors of a response by name, strings as text."""
    reply = response.infer_response
    found: dict[str, Any] = {}
    for output, content in zip(reply.outputs, reply.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            found[output.name] = content[4:].decode()
        else:
            found[output.name] = np.frombuffer(content, {"INT32": "<i4", "UINT32": "<u4"}[output.datatype]).tolist()
    return found
