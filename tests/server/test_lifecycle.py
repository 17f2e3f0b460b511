"""Loading, unloading and stopping a model in a real server, with the echo engine."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from repository_entries import write_echo_entry
from serving_client import GrpcStream, ServerProcess, ask, ask_many

pytestmark = [pytest.mark.server, pytest.mark.model]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two front ends, and no help from auto_complete_config: config.pbtxt alone must do."""
    repository = tmp_path_factory.mktemp("repository")
    write_echo_entry(repository, instances=2)
    # server 2.51 counts a model that failed to load as alive when it stops, and waits the whole timeout for it
    flags = ["--disable-auto-complete-config", "--http-header-forward-pattern=.*", "--grpc-header-forward-pattern=.*"]
    server = ServerProcess(repository, tmp_path_factory.mktemp("server"), flags, exit_timeout_s=2)
    yield server
    server.stop()


def control(server: ServerProcess, action: str, model: str = "echo", body: object = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.http_address, timeout=60)
    connection.request("POST", f"/v2/repository/models/{model}/{action}", json.dumps(body or {}))
    response = connection.getresponse()
    answer = response.status, response.read().decode()
    connection.close()  # an open one makes a stopping server wait for its whole exit timeout
    return answer


def stubs(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.pid).children()


def shared_memory(server: ServerProcess) -> int:
    """Regions of this server alone."""
    return len(list(Path("/dev/shm").glob(f"mstar_{server.process.pid}-*")))


def test_two_front_ends_share_the_requests(server):
    assert len(stubs(server)) == 2
    answers = ask_many(server, "echo", [{"text_input": f"text {n}", "stream": True} for n in range(8)])
    assert [answer.text for answer in answers] == [f"text {n}" for n in range(8)]


def test_forwarded_headers_are_no_unknown_parameters(server):
    headers = {"traceparent": "00-1", "x-request-id": "7", "authorization": "none"}
    with GrpcStream(server, "echo", headers=headers) as stream:
        stream.send({"text_input": "by grpc"})
        assert stream.collect().text == "by grpc"


def test_unload_lets_open_streams_end_and_reload_serves_again(server):
    memory = shared_memory(server)
    for _ in range(2):
        with GrpcStream(server, "echo") as stream:
            stream.send({"text_input": "word " * 200, "stream": True})
            stream.receive()
            assert control(server, "unload")[0] == 200
            assert stream.collect().finish_reason == "stop"
        wait_for_stubs(server, 0)
        assert control(server, "load")[0] == 200
        assert ask(server, "echo", text_input="again").text == "again"
    wait_for_stubs(server, 2)
    assert shared_memory(server) == memory > 0


def wait_for_stubs(server: ServerProcess, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(stubs(server)) != count:
        assert time.monotonic() < deadline, f"{stubs(server)}, not {count}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"no_such_option": "1"}, "no_such_option"),
        ({"max_running_requests": "many"}, "max_running_requests"),
        ({"model": "/no/such/model.gguf"}, "/no/such/model.gguf"),
        ({"model": ""}, "model"),
    ],
)
def test_a_bad_option_is_a_load_error_that_names_it(server, options, words):
    values = {"model": "smollm2-135m", **options}
    config = {
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "instance_group": [{"count": 1, "kind": "KIND_MODEL"}],
        "parameters": {name: {"string_value": value} for name, value in values.items()},
    }
    status, body = control(server, "load", body={"parameters": {"config": json.dumps(config)}})
    assert status == 400
    assert words in json.loads(body)["error"]
    assert ask(server, "echo", text_input="the loaded one stays").text == "the loaded one stays"


def test_stopping_the_server_lets_streams_end_and_exits_zero(tmp_path):
    repository = tmp_path / "repository"
    write_echo_entry(repository)
    server = ServerProcess(repository, tmp_path)
    with GrpcStream(server, "echo") as stream:
        stream.send({"text_input": "word " * 400, "stream": True})
        stream.receive()
        server.process.terminate()
        answer = stream.collect()
    assert answer.error is None
    assert answer.finish_reason == "stop"
    assert server.process.wait(30) == 0
