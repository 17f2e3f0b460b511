"""An engine process that can go on no longer: everybody is told once, and it ends with a code that says why."""

import os
import sys
import time

import pytest
import torch

from mstar.runtime import exit_codes
from mstar.runtime.client import EngineClient
from mstar.runtime.messages import FinishReason
from mstar.runtime.options import EngineOptions
from mstar.runtime.presence import crashed
from mstar.utils.errors import ErrorCode, Unavailable

from .tiny import Recorder, greedy, wait_until, write_checkpoint

# What the engine process does once the file it is told of exists.
FAULTS = {
    "waits for ever": """
        threading.Event().wait()
    """,
    "works for ever": """
        while True: pass
    """,
    "works for long": """
        end = time.monotonic() + 4.2 if os.path.exists(path) else 0
        os.path.exists(path) and os.remove(path)
        while time.monotonic() < end: pass
    """,
    "has a fault": """
        CpuGraphBackend.failure = lambda self: "unspecified launch failure"
        raise RuntimeError("unspecified launch failure")
    """,
    "fails a step": """
        os.remove(path)
        raise RuntimeError("out of memory")
    """,
    "has a kernel that faults": """
        torch.zeros(4, device="cuda")[torch.tensor([10**6], device="cuda")]
    """,
    "has a kernel that hangs": """
        torch.cuda._sleep(10**14)
        os.remove(path)
    """,
    "is wrong": """
        EngineCore.step = None
        return {}
    """,
}
ENGINE = """
import os, sys, textwrap, threading, time
import torch
from mstar.engine.accelerator_graph_backend import CpuGraphBackend, _HostArrays
from mstar.engine.cuda_graph_backend import _PinnedCopy
from mstar.runtime.core import EngineCore
from mstar.runtime import watchdog
from mstar.runtime.engine_process import main
path, Copy = {path!r}, _PinnedCopy if {device!r} == "cuda" else _HostArrays
wait = Copy.wait
watchdog.MOST_LIMITS = 3
def faulty(copy):
    if os.path.exists(path):
{body}
    return wait(copy)
Copy.wait = faulty
sys.exit(main(sys.argv[4:]))
"""


@pytest.fixture
def engine(tmp_path, socket_folder, monkeypatch):
    """A client of an engine of its own, and what makes that show a fault as it waits for a step's tokens."""
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(socket_folder))
    model, path, clients = write_checkpoint(tmp_path / "tiny"), tmp_path / "now", []

    def start(fault: str, device: str = "cpu"):
        body = "\n".join(f"    {line}" for line in FAULTS[fault].splitlines())
        (tmp_path / "engine.py").write_text(ENGINE.format(path=str(path), body=body, device=device))
        python = tmp_path / "python3"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "engine.py"} "$@"\n')
        python.chmod(0o755)
        monkeypatch.setenv("MSTAR_PYTHON", str(python))
        options = EngineOptions(
            model=str(model),
            device=device,
            num_threads=1,
            kv_memory_bytes=2**22,
            max_running_requests=2,
            step_timeout_s=2.0 if device == "cpu" else 5.0,
        )
        client, recorder = EngineClient(os.getpid(), "tiny", options, load_timeout_s=120), Recorder()
        clients.append(client)
        client.start(recorder)
        for ticket in range(3):  # two run, one waits
            client.submit(ticket, greedy([1, 2, 3], 3000 if ticket < 2 else 5))
        recorder.wait(lambda: len(recorder.tokens) == 2)
        path.touch()
        return client, recorder

    yield start
    for client in clients:
        client.close(wait_s=10)


def code_of(client: EngineClient) -> int:
    return client._child.wait(20)


@pytest.mark.parametrize("fault", ["waits for ever", "works for ever"])
def test_a_step_that_never_ends_is_ended_with_its_process(engine, fault):
    client, recorder = engine(fault)
    began = time.monotonic()
    recorder.wait(lambda: bool(recorder.lost), 30)
    assert time.monotonic() - began < 25
    assert code_of(client) == exit_codes.STALLED
    assert not client.is_alive()
    with pytest.raises(Unavailable):
        client.submit(9, greedy([1], 1))
    assert crashed(os.getpid()) == [f"engine tiny (pid {client.engine.pid})"]
    assert "has not ended for" in client._folder.log_path.read_text()
    assert len(recorder.lost) == 1
    assert not recorder.ends


def test_a_step_that_works_for_longer_than_the_limit_is_waited_for(engine):
    client, recorder = engine("works for long")
    wait_until(lambda: "but is at work" in client._folder.log_path.read_text())
    made = len(recorder.tokens[0])
    recorder.wait(lambda: len(recorder.tokens[0]) > made + 10)
    assert client.is_alive()


def test_a_device_that_fails_ends_every_request_once_and_then_the_process(engine):
    client, recorder = engine("has a fault")
    recorder.wait(lambda: bool(recorder.lost), 30)
    assert code_of(client) == exit_codes.DEVICE_FAILED
    assert sorted(recorder.ends) == [0, 1, 2]
    for ends in recorder.ends.values():
        ((code, message),) = ends
        assert code is ErrorCode.INTERNAL
        assert "unspecified launch failure" in message
    assert "the device has failed" in recorder.ends[2][0][1]
    assert crashed(os.getpid()) == [f"engine tiny (pid {client.engine.pid})"]


def test_a_step_that_fails_ends_its_requests_and_the_next_ones_run(engine):
    client, recorder = engine("fails a step")
    recorder.wait(lambda: len(recorder.ends) == 3)
    assert [recorder.ends[ticket][0][0] for ticket in (0, 1)] == [ErrorCode.INTERNAL] * 2
    assert recorder.ends[2] == [FinishReason.LENGTH]
    assert client.is_alive()


def test_a_defect_of_the_loop_ends_the_process(engine):
    client, recorder = engine("is wrong")
    recorder.wait(lambda: bool(recorder.lost), 30)
    assert code_of(client) == 1
    assert crashed(os.getpid()) == [f"engine tiny (pid {client.engine.pid})"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@needs_gpu
def test_a_kernel_that_faults_ends_every_request_once_and_then_the_process(engine):
    client, recorder = engine("has a kernel that faults", "cuda")
    recorder.wait(lambda: bool(recorder.lost), 30)
    assert code_of(client) == exit_codes.DEVICE_FAILED
    assert [len(recorder.ends[ticket]) for ticket in range(3)] == [1, 1, 1]
    assert all("CUDA error" in recorder.ends[ticket][0][1] for ticket in range(3))


@pytest.mark.gpu
@needs_gpu
def test_a_kernel_that_hangs_is_ended_with_its_process(engine):
    client, recorder = engine("has a kernel that hangs", "cuda")
    began = time.monotonic()
    recorder.wait(lambda: bool(recorder.lost), 60)
    assert time.monotonic() - began < 30
    assert code_of(client) == exit_codes.STALLED
    assert "synchronize" in client._folder.log_path.read_text()
