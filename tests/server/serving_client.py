"""A real server in a process of its own, and the requests tests send to it."""

from __future__ import annotations

import http.client
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from mstar.serving.contract import INPUT_BY_NAME

SERVE = "from mstar.cli.main import app; app()"


class ServerProcess:
    """``mstar serve`` over a repository, on free ports of the loopback."""

    def __init__(self, repository: Path, folder: Path, extra: Sequence[str] = (), exit_timeout_s: int = 10) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        ready = folder / "ready.json"
        command = [sys.executable, "-c", SERVE, "serve", "--repository", str(repository)]
        command += ["--address", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        command += ["--ready-file", str(ready), "--log-file", str(self.log), "--exit-timeout", str(exit_timeout_s)]
        command += extra
        with (folder / "launcher.log").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + 120
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.output()}")
            time.sleep(0.05)
        record = json.loads(ready.read_text())
        self.http_address: str = record["http"]
        self.grpc_address: str = record["grpc"]
        self.metrics_address: str = record["metrics"]
        self.pid: int = record["server_pid"]

    def output(self) -> str:
        """What launcher and server printed, its end."""
        files = (self.folder / "launcher.log", self.log)
        return "\n".join(file.read_text(errors="replace")[-4000:] for file in files if file.exists())

    def stop(self, timeout_s: float = 60) -> int:
        """Ask the launcher to stop, as Ctrl-C does; returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@dataclass
class Answer:
    """Everything one request got over gRPC."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # num_output_tokens of each response
    finish_reasons: list[str] = field(default_factory=list)  # of the responses that carry one
    num_input_tokens: int | None = None
    outputs: list[dict[str, list[Any]]] = field(default_factory=list)  # of each response, strings as text
    error: str | None = None
    finals: list[bool] = field(default_factory=list)  # the final flag of each response, empty ones too
    empties: int = 0  # responses without any tensor

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def usage(self) -> int:
        return sum(self.counts)

    def joined(self, output: str) -> list[Any]:
        """An output's elements over all responses."""
        return [item for outputs in self.outputs for item in outputs.get(output, [])]

    @property
    def sequence_texts(self) -> list[str]:
        """The text of each of n sequences, streamed or not."""
        texts: dict[int, str] = {}
        for outputs in self.outputs:
            for index, text in zip(outputs["sequence_index"], outputs["text_output"], strict=True):
                texts[index] = texts.get(index, "") + text
        return [texts[index] for index in sorted(texts)]

    @property
    def finish_reason(self) -> str | None:
        return self.finish_reasons[-1] if self.finish_reasons else None


def tensor(name: str, value: Any, dtype: str | None = None) -> grpcclient.InferInput:
    """An input in the contract's dtype and rank; an array is sent as it is."""
    spec = INPUT_BY_NAME[name]
    if isinstance(value, np.ndarray):
        array = value
    else:
        items = value if spec.is_list else [value]
        if spec.dtype == "STRING":
            items = [item.encode() if isinstance(item, str) else item for item in items]
        array = np.array(items, dtype=spec.numpy_type)
    made = grpcclient.InferInput(name, list(array.shape), dtype or {"STRING": "BYTES"}.get(spec.dtype, spec.dtype))
    made.set_data_from_numpy(array)
    return made


class GrpcStream:
    """One gRPC stream; requests on it are told apart by their request id."""

    def __init__(self, server: ServerProcess, model: str, headers: Mapping[str, str] | None = None) -> None:
        self._model = model
        self._client = grpcclient.InferenceServerClient(server.grpc_address)
        self._inbox: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._inbox.put((result, error)), headers=headers)

    def send(
        self,
        inputs: Mapping[str, Any] | Sequence[grpcclient.InferInput],
        *,
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        final_response: bool = True,
        **settings: Any,
    ) -> None:
        """``settings``: of the server itself, as its client names them."""
        tensors = [tensor(*item) for item in inputs.items()] if isinstance(inputs, Mapping) else list(inputs)
        self._client.async_stream_infer(
            self._model,
            tensors,
            request_id=request_id,
            parameters=dict(parameters or {}),
            enable_empty_final_response=final_response,
            **settings,
        )

    def receive(self, timeout_s: float = 60) -> tuple[Any, InferenceServerException | None]:
        return self._inbox.get(timeout=timeout_s)

    def collect(self, timeout_s: float = 60) -> Answer:
        """Responses up to the final one (or an error, after which the server's client gets no more)."""
        answer = Answer()
        while True:
            result, error = self.receive(timeout_s)
            if error is not None:
                answer.error = error.message()
                return answer
            if add_response(answer, result):
                return answer

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def add_response(answer: Answer, result: Any) -> bool:
    """Take a response into an answer; returns whether it was the final one."""
    response = result.get_response()
    is_final = response.parameters["triton_final_response"].bool_param
    answer.finals.append(is_final)
    if not response.outputs:
        answer.empties += 1
        return is_final
    outputs = {output.name: _listed(result.as_numpy(output.name)) for output in response.outputs}
    answer.outputs.append(outputs)
    answer.texts += outputs["text_output"]
    answer.counts += outputs["num_output_tokens"]
    answer.num_input_tokens = outputs["num_input_tokens"][0]
    answer.token_ids += outputs.get("output_ids", [])
    answer.finish_reasons += outputs.get("finish_reason", [])
    return is_final


def _listed(array: np.ndarray) -> list[Any]:
    """An output's elements, strings as text."""
    return [item.decode() for item in array] if array.dtype == np.object_ else array.tolist()


def ask(server: ServerProcess, model: str, *, timeout_s: float = 60, **values: Any) -> Answer:
    """One request on a stream of its own; ``parameters`` are request parameters, all else are inputs."""
    parameters = values.pop("parameters", None)
    with GrpcStream(server, model) as stream:
        stream.send(values, parameters=parameters)
        return stream.collect(timeout_s)


def ask_many(server: ServerProcess, model: str, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """All requests at once, each on a stream of its own."""
    answers: list[Answer] = [Answer()] * len(requests)

    def run(index: int) -> None:
        answers[index] = ask(server, model, **requests[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def post(
    server: ServerProcess, model: str, body: Any, *, stream: bool = False, timeout_s: float = 60
) -> tuple[int, str]:
    """Status and body of an HTTP generate (or generate_stream) call; ``body`` is JSON, or text sent as it is."""
    connection = open_post(server, model, body, stream=stream, timeout_s=timeout_s)
    try:
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def open_post(
    server: ServerProcess, model: str, body: Any, *, stream: bool = True, timeout_s: float = 60
) -> http.client.HTTPConnection:
    """A connection on which the request was sent and nothing read."""
    connection = http.client.HTTPConnection(server.http_address, timeout=timeout_s)
    text = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", f"/v2/models/{model}/generate{'_stream' if stream else ''}", text.encode())
    return connection


def events(body: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream."""
    for line in body.splitlines():
        if line.startswith("data: "):
            yield json.loads(line[len("data: ") :])
