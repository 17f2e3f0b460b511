"""The engine's loop, in a thread of this process."""

import dataclasses
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
from mstar.runtime.core import MESSAGES_PER_STEP, EngineCore
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


def test_a_cancel_does_not_wait_behind_a_flood_of_requests(served, client, monkeypatch):
    core, _ = served
    recorder, step, cancel = client.recorder, core.step, core.cancel
    steps, cancelled_at = [0], {}

    def slow_step():
        steps[0] += 1
        time.sleep(0.05)
        return step()

    def noted_cancel(request_id):
        cancelled_at[request_id] = steps[0]
        cancel(request_id)

    client.submit(0, greedy([1], 4000))
    recorder.wait(lambda: recorder.tokens.get(0))
    monkeypatch.setattr(core, "step", slow_step)
    monkeypatch.setattr(core, "cancel", noted_cancel)
    for ticket in range(1, 301):
        client.submit(ticket, greedy([2], 3))
    before = steps[0]
    for ticket in (0, 300):
        client.cancel(ticket)
    recorder.wait(lambda: len(recorder.ends) == 301)
    assert recorder.ends[0] == recorder.ends[300] == [FinishReason.CANCELLED]
    assert 300 not in recorder.tokens
    assert all(recorder.ends[ticket] == [FinishReason.LENGTH] for ticket in range(1, 300))
    assert len(cancelled_at) == 2
    assert max(cancelled_at.values()) - before <= 2 < 300 // MESSAGES_PER_STEP


def test_a_flood_is_let_in_sooner_where_steps_are_long(served, client, monkeypatch):
    core, _ = served
    recorder, step, submit = client.recorder, core.step, core.submit
    steps, submitted_at = [0], {}

    def long_step():
        steps[0] += 1
        time.sleep(0.5)
        return step()

    def noted_submit(request, number, ticket):
        submitted_at[ticket] = steps[0]
        return submit(request, number, ticket)

    client.submit(0, greedy([1], 4000))
    recorder.wait(lambda: recorder.tokens.get(0))
    monkeypatch.setattr(core, "step", long_step)
    monkeypatch.setattr(core, "submit", noted_submit)
    for ticket in range(1, 801):
        client.submit(ticket, greedy([2], 3))
    before = steps[0]
    client.submit(801, msgspec.structs.replace(greedy([3], 3), deadline_ns=time.monotonic_ns() + 10**9))
    recorder.wait(lambda: 801 in recorder.ends)
    monkeypatch.setattr(core, "step", step)
    assert submitted_at[801] - before <= 6 < 801 // MESSAGES_PER_STEP
    assert recorder.ends[801][0][0] is ErrorCode.UNAVAILABLE  # its time was over, of which it heard in time
    recorder.wait(lambda: len(recorder.ends) == 801)


def test_a_flood_that_the_queue_cannot_take_is_refused_at_once(served, client, monkeypatch):
    core, options = served
    recorder, step = client.recorder, core.step
    monkeypatch.setattr(core.conductor, "limits", dataclasses.replace(core.conductor.limits, max_queued_requests=5))
    monkeypatch.setattr(core.conductor._lobby, "_limits", core.conductor.limits)
    monkeypatch.setattr(core, "step", lambda: time.sleep(0.1) or step())
    num_accepted = options.max_running_requests + 5
    began = time.monotonic()
    for ticket in range(400):
        client.submit(ticket, greedy([2], 40))
    recorder.wait(lambda: len(recorder.ends) >= 400 - num_accepted)
    assert time.monotonic() - began < 40 * 0.1
    monkeypatch.setattr(core, "step", step)
    refused = [ticket for ticket, ends in recorder.ends.items() if ends[0] != FinishReason.LENGTH]
    assert {recorder.ends[ticket][0][0] for ticket in refused} == {ErrorCode.UNAVAILABLE}
    recorder.wait(lambda: len(recorder.ends) == 400)
    assert len(refused) == 400 - num_accepted


def test_a_request_that_breaks_the_conductor_is_answered(served, client, monkeypatch):
    core, _ = served
    submit = core.submit
    monkeypatch.setattr(core, "submit", lambda *_: 1 / 0)
    client.submit(1, greedy([1], 2))
    recorder = client.recorder
    recorder.wait(lambda: 1 in recorder.ends)
    assert recorder.ends[1] == [(ErrorCode.INTERNAL, "division by zero")]
    monkeypatch.setattr(core, "submit", submit)
    client.submit(2, greedy([1], 2))
    recorder.wait(lambda: 2 in recorder.ends)
    assert recorder.ends[2] == [FinishReason.LENGTH]


def test_a_front_end_that_leaves_takes_its_requests_along_also_those_not_let_in_yet(served, client, monkeypatch):
    core, options = served
    step = core.step
    monkeypatch.setattr(core, "step", lambda: time.sleep(0.05) or step())
    other = EngineClient(os.getpid(), "here", options)
    other.start(Recorder())
    for ticket in range(300):
        other.submit(ticket, greedy([2], 4000))
    client.submit(1, greedy([1], 30))
    other.close()
    client.recorder.wait(lambda: 1 in client.recorder.ends)
    assert client.recorder.ends[1] == [FinishReason.LENGTH]
    wait_until(lambda: client.board[Slot.RUNNING] == client.board[Slot.QUEUED] == 0)
