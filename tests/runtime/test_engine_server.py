"""The engine's loop, in a thread of this process."""

import os
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from mstar.conductor.request import LOGPROB
from mstar.runtime import client as client_module
from mstar.runtime import fronts
from mstar.runtime.board import Board, Slot
from mstar.runtime.client import EngineClient
from mstar.runtime.core import EngineCore
from mstar.runtime.engine_server import EngineServer
from mstar.runtime.messages import FinishReason
from mstar.runtime.options import EngineOptions
from mstar.runtime.presence import EngineRecord, open_engine_folder
from mstar.runtime.processes import ExitWatch, start_ticks
from mstar.utils.errors import ErrorCode

from .tiny import VOCAB, Recorder, greedy, wait_until, write_checkpoint


@pytest.fixture
def served(tmp_path_factory, socket_folder, monkeypatch):
    """(core, options) of an engine that a thread of this process serves."""
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(socket_folder))
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


@pytest.fixture
def client(served):
    client = EngineClient(os.getpid(), "here", served[1])
    client.recorder = Recorder()
    client.start(client.recorder)
    yield client
    client.close()


def test_log_probabilities_come_with_their_tokens_and_those_of_the_prompt_before(client):
    asking = msgspec.structs.replace(greedy([1, 2, 3], 3), num_logprobs=2, num_prompt_logprobs=0)
    client.submit(1, asking)
    client.submit(2, greedy([1, 2, 3], 3))
    recorder = client.recorder
    recorder.wait(lambda: len(recorder.ends) == 2)
    assert recorder.tokens[1] == recorder.tokens[2]
    told = np.array(recorder.logprobs[1], LOGPROB)
    assert told["rank"].tolist() == [1, 1, 1]  # greedy
    assert told["top_ids"][:, 0].tolist() == recorder.tokens[1]
    assert np.all(told["top_ids"][:, 2:] == -1)
    assert np.all(told["logprob"] == told["top_logprobs"][:, 0])
    assert np.all(told["logprob"] < 0)
    assert 2 not in recorder.logprobs
    assert recorder.prompt_logprobs.keys() == {1}
    prompt = recorder.prompt_logprobs[1]
    assert len(prompt) == 2
    assert np.all(prompt["top_ids"] == -1)
    assert np.all(prompt["rank"] >= 1)


def test_what_cannot_be_is_refused_and_named(client):
    for ticket, fields in enumerate(({"stop_ids": (VOCAB,)}, {"num_logprobs": 21}, {"top_p": 0.0}), start=1):
        client.submit(ticket, msgspec.structs.replace(greedy([1], 2), **fields))
    recorder = client.recorder
    recorder.wait(lambda: len(recorder.ends) == 3)
    codes, messages = zip(*(recorder.ends[ticket][0] for ticket in (1, 2, 3)), strict=True)
    assert set(codes) == {ErrorCode.INVALID_ARG}
    assert [message.split()[0].rstrip(":") for message in messages] == ["stop_token_ids", "logprobs", "top_p"]


def test_time_that_runs_out_is_counted_on_the_board(served, client):
    limit_ns = 300_000_000
    client.submit(1, msgspec.structs.replace(greedy([1], 4000), deadline_ns=time.monotonic_ns() + limit_ns))
    recorder = client.recorder
    recorder.wait(lambda: recorder.ends)
    assert recorder.ends == {1: [FinishReason.TIMEOUT]}
    assert recorder.tokens[1]
    wait_until(lambda: client.board[Slot.FINISHED_TIMEOUT] == 1)
    assert (client.board[Slot.EXPIRED], client.board[Slot.CONSTRAINT_FAULTS]) == (0, 0)


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
