"""The engine's loop, in a thread of this process."""

import os
import threading
import time

import pytest
import zmq

from mstar.runtime import client as client_module
from mstar.runtime import fronts
from mstar.runtime.board import Board
from mstar.runtime.client import EngineClient
from mstar.runtime.core import EngineCore
from mstar.runtime.engine_server import EngineServer
from mstar.runtime.messages import FinishReason
from mstar.runtime.options import EngineOptions
from mstar.runtime.presence import EngineRecord, open_engine_folder
from mstar.runtime.processes import ExitWatch, start_ticks

from .tiny import Recorder, greedy, write_checkpoint


@pytest.fixture
def served(tmp_path_factory, monkeypatch):
    """(core, options) of an engine that a thread of this process serves."""
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    model = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    options = EngineOptions(model=str(model), device="cpu", kv_memory_bytes=2**20)
    core = EngineCore(options)
    me, started = os.getpid(), start_ticks(os.getpid()) or 0
    folder = open_engine_folder(me, "here", options.key())
    folder.write_engine(EngineRecord(pid=me, started=started, name="here"))
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(folder.socket_address)
    server = EngineServer(core, folder, socket, ExitWatch(me, started), Board.create(folder.board_path))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield core, options
    server.drain(0.0)
    thread.join(20)
    socket.close(linger=0)
    context.term()
    assert not thread.is_alive()


def test_beats_sent_during_a_long_step_count(served, monkeypatch):
    core, options = served
    monkeypatch.setattr(client_module, "BEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(client_module, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(fronts, "HUNG_AFTER_S", 0.5)
    step = core.step

    def long_step():
        time.sleep(1.5)
        return step()

    monkeypatch.setattr(core, "step", long_step)
    client = EngineClient(os.getpid(), "here", options)
    recorder = Recorder()
    client.start(recorder)
    try:
        client.submit(1, greedy([1, 2, 3], 3))
        recorder.wait(lambda: recorder.ends)
        assert recorder.ends == {1: [FinishReason.LENGTH]}
    finally:
        client.close()
