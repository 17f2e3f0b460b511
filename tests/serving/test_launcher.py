"""``mstar serve`` with a real server: addresses, exit codes, and nothing left behind."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mstar.serving import launcher
from mstar.serving.launcher import LaunchOptions, clear_leftovers, launch
from mstar.serving.ports import choose_port, choose_ports, format_address
from mstar.utils.errors import LoadError

MODEL = Path(__file__).with_name("counting_model.py")
CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_MODEL } ]
"""
COMMAND = [sys.executable, "-c", "from mstar.cli.main import app; app()", "serve"]


class Launched:
    """A running ``mstar serve`` and all it started."""

    def __init__(self, repository: Path, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.ready_file = folder / "ready.json"
        self.environment = {
            **os.environ,
            "TMPDIR": str(folder / "tmp"),
            "MSTAR_RUNTIME_DIR": str(folder / "run"),
        }
        (folder / "tmp").mkdir(exist_ok=True)
        ports = ["--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
        files = [f"--repository={repository}", f"--ready-file={self.ready_file}", f"--log-file={folder / 'log'}"]
        self.process = subprocess.Popen(
            [*COMMAND, *ports, *files, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        self.family: list[psutil.Process] = []

    def wait_ready(self) -> dict[str, str]:
        deadline = time.monotonic() + 60
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.read_output()
            assert time.monotonic() < deadline, "not ready within 60 s"
            time.sleep(0.05)
        self.addresses: dict[str, str] = json.loads(self.ready_file.read_text())
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return self.addresses

    def send(self, text: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.addresses["http"], timeout=60)
        connection.request("POST", "/v2/models/counter/generate_stream", json.dumps({"text_input": text}))
        return connection.getresponse()

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def read_output(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def assert_nothing_left(self, patience_s: float = 0.0) -> None:
        _, alive = psutil.wait_procs(self.family, patience_s + 0.5)
        assert not alive
        assert not self.ready_file.exists()
        assert not list((self.folder / "tmp").glob("mstar-serve-*"))
        assert not list((self.folder / "run").glob("*"))
        assert not list(Path("/dev/shm").glob(f"mstar_{self.process.pid}*"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    (root / "counter" / "1").mkdir(parents=True)
    (root / "counter" / "config.pbtxt").write_text(CONFIG)
    shutil.copy(MODEL, root / "counter" / "1" / "model.py")
    return root


@pytest.fixture
def start(repository: Path, socket_folder: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start_one(*flags: str) -> Launched:
        started.append(Launched(repository, socket_folder, *flags))
        return started[-1]

    yield start_one
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.wait()
        for process in launched.family:
            if process.is_running():
                process.kill()


@pytest.mark.server
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_drains_and_exits_0(start: Callable[..., Launched], number: int) -> None:
    launched = start()
    launched.wait_ready()
    response = launched.send("30")
    assert response.status == 200
    response.readline()  # the stream is under way
    assert launched.stop(number) == 0
    events = [line for line in response.read().splitlines() if line.startswith(b"data:")]
    assert json.loads(events[-1].removeprefix(b"data:"))["text_output"] == "29"
    output = launched.read_output()
    for name in ("http", "grpc", "metrics"):
        assert launched.addresses[name] in output
    launched.assert_nothing_left()


@pytest.mark.server
def test_idle_connection_does_not_hold_up_the_exit(start: Callable[..., Launched]) -> None:
    launched = start()
    launched.wait_ready()
    connection = http.client.HTTPConnection(launched.addresses["http"], timeout=60)
    connection.request("GET", "/v2/health/live")
    connection.getresponse().read()  # and the connection stays open, as a client's pool keeps it
    assert launched.stop(timeout_s=15) == 0
    launched.assert_nothing_left()


@pytest.mark.server
def test_draining_server_is_not_ready_and_refuses_new_requests(start: Callable[..., Launched]) -> None:
    launched = start()
    launched.wait_ready()
    response = launched.send("60")
    response.readline()
    launched.process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert launched.send("1").status == 404
    connection = http.client.HTTPConnection(launched.addresses["http"], timeout=60)
    connection.request("GET", "/v2/health/ready")
    assert connection.getresponse().status == 400
    assert b'"59"' in response.read()
    assert launched.process.wait(30) == 0


@pytest.mark.server
def test_drain_that_takes_too_long_is_cut_and_exits_1(start: Callable[..., Launched]) -> None:
    launched = start("--exit-timeout=1")
    launched.wait_ready()
    launched.send("1000").readline()
    assert launched.stop(timeout_s=20) == 1
    launched.assert_nothing_left()


@pytest.mark.server
def test_signal_while_loading_stops_at_once(start: Callable[..., Launched], tmp_path: Path) -> None:
    slow = tmp_path / "models" / "slow"
    (slow / "1").mkdir(parents=True)
    (slow / "config.pbtxt").write_text(CONFIG)
    (slow / "1" / "model.py").write_text("import time\ntime.sleep(300)\n")
    launched = start(f"--repository={slow.parent}")
    time.sleep(3)
    launched.family = psutil.Process(launched.process.pid).children(recursive=True)
    assert launched.stop(timeout_s=20) == 0
    launched.assert_nothing_left()


@pytest.mark.server
@pytest.mark.parametrize("mode", ["none", "poll"])
def test_other_model_control_modes_work_too(start: Callable[..., Launched], mode: str) -> None:
    launched = start(f"--model-control-mode={mode}")
    launched.wait_ready()
    response = launched.send("20")
    response.readline()
    assert b'"19"' in response.read()
    response.close()
    assert launched.stop(timeout_s=30) == 0


@pytest.mark.server
def test_second_signal_kills_and_exits_1(start: Callable[..., Launched]) -> None:
    launched = start()
    launched.wait_ready()
    response = launched.send("1000")
    response.readline()
    launched.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert launched.stop(signal.SIGTERM, timeout_s=20) == 1
    launched.assert_nothing_left()


@pytest.mark.server
@pytest.mark.parametrize(("victim", "named"), [("engine", "engine counter"), ("stub", "front end")])
def test_lost_process_is_named_and_ends_the_server_with_1(
    start: Callable[..., Launched], victim: str, named: str
) -> None:
    launched = start("--grace=0.5")
    launched.wait_ready()
    killer = threading.Thread(target=lambda: swallow(lambda: launched.send(victim).read()))
    killer.start()
    assert launched.process.wait(30) == 1
    killer.join(30)
    output = launched.read_output()
    assert named in output
    assert ("the engine's last words" in output) == (victim == "engine")
    launched.assert_nothing_left()


@pytest.mark.server
def test_grace_lets_answers_out_before_the_end(start: Callable[..., Launched]) -> None:
    launched = start("--grace=2")
    launched.wait_ready()
    launched.send("engine").read()
    response = launched.send("1")  # within the grace the server still takes requests
    assert b'"0"' in response.read()
    assert launched.process.wait(30) == 1


@pytest.mark.server
def test_killed_server_gives_its_own_exit_code(start: Callable[..., Launched]) -> None:
    launched = start()
    os.kill(int(launched.wait_ready()["server_pid"]), signal.SIGKILL)
    assert launched.process.wait(30) == 128 + signal.SIGKILL
    launched.assert_nothing_left()


@pytest.mark.server
def test_killed_launcher_takes_the_server_along(start: Callable[..., Launched]) -> None:
    launched = start()
    launched.wait_ready()
    launched.process.kill()
    _, alive = psutil.wait_procs(launched.family, 20)
    assert not alive


@pytest.mark.server
def test_leftovers_of_a_killed_launcher_are_cleared_by_the_next(start: Callable[..., Launched]) -> None:
    first = start()
    first.wait_ready()
    for process in (first.process, *first.family):
        process.kill()
    first.process.wait()
    assert list((first.folder / "tmp").glob("mstar-serve-*"))
    first.ready_file.unlink()
    second = start()
    second.wait_ready()
    assert second.stop() == 0
    first.assert_nothing_left()


@pytest.mark.server
def test_unload_is_no_failure(start: Callable[..., Launched]) -> None:
    launched = start()
    launched.wait_ready()
    for action in ("unload", "load", "load"):
        connection = http.client.HTTPConnection(launched.addresses["http"], timeout=60)
        connection.request("POST", f"/v2/repository/models/counter/{action}", "{}")
        assert connection.getresponse().status == 200
    time.sleep(1.5)
    assert launched.process.poll() is None
    assert launched.stop() == 0


@pytest.mark.server
def test_model_that_cannot_load_shows_the_server_log(start: Callable[..., Launched], tmp_path: Path) -> None:
    broken = tmp_path / "models" / "broken"
    (broken / "1").mkdir(parents=True)
    (broken / "config.pbtxt").write_text(CONFIG)
    (broken / "1" / "model.py").write_text("raise ValueError('no such luck')\n")
    launched = start(f"--repository={broken.parent}")
    assert launched.process.wait(60) == 1
    assert "no such luck" in launched.read_output()
    launched.assert_nothing_left()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repository=absent"], "--repository: "),
        (["--model=absent"], "--model: one of counter, got absent"),
        (["--grace=-1"], "--grace: "),
        (["--exit-timeout=0"], "--exit-timeout: "),
        (["--http-port=70000"], "--http-port: 0 to 65535, got 70000"),
        (["--http-port=8123", "--grpc-port=8123"], "--grpc-port: port 8123 is also --http-port"),
        (["--address=192.0.2.1"], "--http-port: cannot listen on 192.0.2.1"),
        (["--log-file=/nowhere/log"], "--log-file: "),
        (["--tritonserver=/nowhere/tritonserver"], "not an executable"),
        (["--", "--grpc-port=1"], "--grpc-port: set it with an option"),
    ],
)
def test_what_cannot_be_started_is_said_and_exits_2(
    start: Callable[..., Launched], flags: list[str], message: str
) -> None:
    launched = start(*flags)
    assert launched.process.wait(30) == 2
    assert message in launched.read_output()


def test_busy_port_is_named_with_its_option() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(LoadError, match=f"--grpc-port: port {port} is in use"):
            choose_ports("127.0.0.1", 0, port, 0)


def test_port_0_chooses_three_different_free_ports() -> None:
    ports = choose_ports("127.0.0.1", 0, 0, 0)
    assert len(set(ports)) == 3
    assert all(choose_port("--http-port", "127.0.0.1", port) == port for port in ports)


@pytest.mark.parametrize(
    ("address", "shown"),
    [("0.0.0.0", "127.0.0.1:80"), ("::", "[::1]:80"), ("10.0.0.1", "10.0.0.1:80"), ("localhost", "localhost:80")],
)
def test_address_is_one_that_a_client_here_can_use(address: str, shown: str) -> None:
    assert format_address(address, 80) == shown


def swallow(call: Callable[[], object]) -> None:
    """The victim of a killed process may get any error or none."""
    try:
        call()
    except (OSError, http.client.HTTPException):
        return


def test_a_repository_path_with_a_space_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    with pytest.raises(LoadError, match="--repository: a path without spaces"):
        launch(LaunchOptions(repository=folder))


def test_shared_memory_of_the_dead_is_cleared_and_that_of_the_living_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "SHM_FOLDER", tmp_path)
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (f"mstar_{dead.pid}-abc_region", f"mstar_{os.getpid()}-abc_region", "mstar_other-region", "unrelated"):
        (tmp_path / name).touch()
    clear_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"mstar_{os.getpid()}-abc_region", "mstar_other-region", "unrelated",
    ]  # fmt: skip
