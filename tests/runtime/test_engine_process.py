"""Engine processes as front ends meet them: started, shared, killed, left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mstar.runtime.board import Board, EngineState
from mstar.runtime.client import EngineClient
from mstar.runtime.messages import FinishReason
from mstar.runtime.options import EngineOptions
from mstar.runtime.presence import crashed, engine_folders
from mstar.utils.errors import ErrorCode, LoadError, Unavailable

from .tiny import CONTEXT, VOCAB, Recorder, greedy, wait_until, write_checkpoint

ENDLESS = greedy([1, 2, 3], 4000)


@pytest.fixture(autouse=True)
def runtime_folder(socket_folder, monkeypatch):
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(socket_folder))
    return socket_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def attach(model):
    """Starts clients of one engine; closes them, and with them the engine, at the end."""
    clients = []

    def start(name="tiny", server_pid=None, **options):
        fields = {"model": str(model), "device": "cpu", "num_threads": 1, "kv_memory_bytes": 64 * 2**20} | options
        client = EngineClient(server_pid or os.getpid(), name, EngineOptions(**fields), load_timeout_s=120)
        clients.append(client)
        recorder = Recorder()
        client.start(recorder)
        return client, recorder

    yield start
    for client in clients:
        client.close(wait_s=10)


def test_a_request_runs_and_the_board_counts_it(attach):
    client, recorder = attach()
    assert (client.info.vocab_size, client.info.max_seq_len) == (VOCAB, CONTEXT)
    client.submit(7, greedy([1, 2, 3], 5))
    client.submit(8, greedy([1, 2, 3], 0))
    recorder.wait(lambda: len(recorder.ends) == 2)
    assert len(recorder.tokens[7]) == 5
    assert 8 not in recorder.tokens
    assert recorder.ends == {7: [FinishReason.LENGTH], 8: [FinishReason.LENGTH]}
    wait_until(lambda: client.board.running == 0)
    assert client.board.state == EngineState.READY


def test_refusals_come_back_as_failures_and_the_next_request_is_served(attach):
    client, recorder = attach()
    client.submit(1, greedy([VOCAB], 5))
    client.submit(2, greedy([1], 1))
    recorder.wait(lambda: len(recorder.ends) == 2)
    code, message = recorder.ends[1][0]
    assert code is ErrorCode.INVALID_ARG
    assert "token ids in [0, 64)" in message
    assert recorder.ends[2] == [FinishReason.LENGTH]


def test_two_front_ends_share_one_engine_and_the_last_to_leave_ends_it(attach):
    first, heard_first = attach()
    second, heard_second = attach()
    assert first.engine == second.engine
    for ticket in range(4):
        first.submit(ticket, greedy([1, 2, ticket], 6))
        second.submit(ticket, greedy([1, 2, ticket], 6))
    heard_first.wait(lambda: len(heard_first.ends) == 4)
    heard_second.wait(lambda: len(heard_second.ends) == 4)
    assert heard_first.tokens == heard_second.tokens
    first.close()
    second.submit(9, greedy([5], 2))
    heard_second.wait(lambda: 9 in heard_second.ends)
    engine = second.engine
    second.close()
    wait_until(lambda: not engine.is_alive(), 10)
    assert crashed(os.getpid()) == []
    assert heard_second.lost == []


def test_an_engine_leaves_soon_after_a_front_end_that_stayed_a_moment(attach):
    client, _ = attach()
    client.close()
    wait_until(lambda: not client.engine.is_alive(), 10)


def test_other_options_are_another_engine_and_a_reload_attaches(attach):
    first, _ = attach()
    other, _ = attach(max_running_requests=8)
    assert first.engine.pid != other.engine.pid
    again, _ = attach()
    first.close()
    time.sleep(1.5)  # longer than an engine stays without front ends
    assert again.is_alive()
    assert again.engine.pid == first.engine.pid


def test_cancel_and_finish_free_the_row_within_a_moment(attach):
    client, recorder = attach()
    client.submit(1, ENDLESS)
    client.submit(2, ENDLESS)
    recorder.wait(lambda: len(recorder.tokens.get(1, [])) > 3 and len(recorder.tokens.get(2, [])) > 3)
    for _ in range(2):
        client.cancel(1)
        client.finish(2, 3)
    recorder.wait(lambda: 1 in recorder.ends)
    wait_until(lambda: client.board.running == 0, 5)
    count = len(recorder.tokens[2])
    client.submit(3, greedy([1], 1))
    recorder.wait(lambda: 3 in recorder.ends)
    assert recorder.ends == {1: [FinishReason.CANCELLED], 3: [FinishReason.LENGTH]}
    assert len(recorder.tokens[2]) == count


def test_a_cancel_of_what_has_ended_is_not_there_or_is_anothers_has_no_effect(attach):
    client, recorder = attach()
    other, heard = attach()
    client.submit(1, greedy([1], 2))
    recorder.wait(lambda: 1 in recorder.ends)
    other.submit(5, greedy([1, 2, 3], 500))
    heard.wait(lambda: 5 in heard.tokens)
    for ticket in (1, 5, 2**40):
        client.cancel(ticket)
    client.submit(2, greedy([1], 1))
    recorder.wait(lambda: 2 in recorder.ends)
    assert 5 not in heard.ends  # it still ran when the engine read the cancels, which came before
    heard.wait(lambda: 5 in heard.ends)
    assert heard.ends == {5: [FinishReason.LENGTH]}
    assert len(heard.tokens[5]) == 500
    assert recorder.ends == {1: [FinishReason.LENGTH], 2: [FinishReason.LENGTH]}


def test_a_killed_engine_is_noticed_at_once_and_once(attach):
    client, recorder = attach()
    _, heard_beside = attach()
    for ticket in range(8):
        client.submit(ticket, ENDLESS)
    recorder.wait(lambda: len(recorder.tokens) == 8)
    killed_at = time.monotonic()
    os.kill(client.engine.pid, signal.SIGKILL)
    recorder.wait(lambda: bool(recorder.lost))
    took = time.monotonic() - killed_at
    heard_beside.wait(lambda: bool(heard_beside.lost))
    assert took < 1.0  # 0.2 s on a quiet machine
    assert not client.is_alive()
    with pytest.raises(Unavailable, match="ended"):
        client.submit(99, ENDLESS)
    client.cancel(0)
    time.sleep(0.5)
    assert len(recorder.lost) == 1
    assert crashed(os.getpid()) == [f"engine tiny (pid {client.engine.pid})"]


def test_a_stopped_engine_is_lost_when_its_beat_is_stale(attach):
    client, recorder = attach()
    os.kill(client.engine.pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    try:
        recorder.wait(lambda: bool(recorder.lost), 30)
        assert 4.5 < time.monotonic() - stopped_at < 20
        assert "has not answered for 5 s" in recorder.lost[0]
    finally:
        os.kill(client.engine.pid, signal.SIGKILL)


FRONT_END = """
import os, sys, time
from mstar.runtime.client import EngineClient
from mstar.runtime.options import EngineOptions
import msgspec
sys.path.insert(0, {tests!r})
from runtime.tiny import Recorder, greedy
options = msgspec.json.decode({options!r}, type=EngineOptions)
client = EngineClient({server}, "tiny", options)
recorder = Recorder()
client.start(recorder)
for ticket in range(6):
    client.submit(ticket, greedy([1, 2, 3], 4000))
recorder.wait(lambda: len(recorder.tokens) == 6)
assert "torch" not in sys.modules
print("running", client.engine.pid, flush=True)
time.sleep(120)
"""


def start_front_end(options, server_pid):
    import msgspec

    tests = str(Path(__file__).resolve().parents[1])
    code = FRONT_END.format(tests=tests, options=msgspec.json.encode(options), server=server_pid)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    word, pid = child.stdout.readline().split()
    assert word == "running"
    return child, int(pid)


def test_a_dead_front_ends_requests_are_dropped_and_others_go_on(attach):
    client, recorder = attach()
    child, engine_pid = start_front_end(client._options, os.getpid())
    assert engine_pid == client.engine.pid
    client.submit(1, greedy([1, 2], 300))
    wait_until(lambda: client.board.running == 7)
    child.kill()
    child.wait()
    wait_until(lambda: client.board.running <= 1, 5)
    recorder.wait(lambda: 1 in recorder.ends)
    assert recorder.ends[1] == [FinishReason.LENGTH]
    assert crashed(os.getpid()) == [f"front end of {engine_folders(os.getpid())[0].path.name} (pid {child.pid})"]


def test_an_engine_ends_with_its_server(model):
    server = subprocess.Popen(["sleep", "300"])
    options = EngineOptions(model=str(model), device="cpu", num_threads=1, kv_memory_bytes=64 * 2**20)
    child, engine_pid = start_front_end(options, server.pid)
    try:
        server.kill()
        server.wait()
        wait_until(lambda: _is_gone(engine_pid), 10)
    finally:
        child.kill()
        child.wait()


def _is_gone(pid):
    """Whether the process is gone, or a zombie its parent has not looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_sigterm_drains(attach):
    client, recorder = attach()
    client.submit(1, greedy([1, 2], 600))
    recorder.wait(lambda: 1 in recorder.tokens)
    os.kill(client.engine.pid, signal.SIGTERM)
    wait_until(lambda: client.board.is_draining, 5)
    with pytest.raises(Unavailable, match=r"draining|ended"):
        client.submit(2, greedy([1], 1))
    recorder.wait(lambda: bool(recorder.lost))
    assert recorder.ends[1] == [FinishReason.LENGTH]
    assert len(recorder.tokens[1]) == 600


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"max_seq_len": CONTEXT + 1}, "max_seq_len"),
        ({"device": "cuda:77"}, "device"),
    ],
)
def test_a_load_error_reaches_the_client_in_its_own_words(attach, options, message):
    with pytest.raises(LoadError, match=message):
        attach(**options)
    assert crashed(os.getpid()) == []


def test_an_interpreter_that_cannot_run_the_engine_shows_its_last_words(attach, monkeypatch, tmp_path):
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho this is no python >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("MSTAR_PYTHON", str(python))
    with pytest.raises(LoadError, match="this is no python"):
        attach()


def test_the_queue_is_bounded_and_every_request_ends_once(attach):
    client, recorder = attach(max_running_requests=2, max_queued_requests=3)
    for ticket in range(20):
        try:
            client.submit(ticket, greedy([1, 2], 50))
        except Unavailable:
            recorder.ends[ticket] = ["refused"]
    recorder.wait(lambda: len(recorder.ends) == 20)
    finished = [ticket for ticket, ends in recorder.ends.items() if ends == [FinishReason.LENGTH]]
    assert len(finished) >= 5
    assert set(range(5)) <= set(finished)  # two run, three wait, whatever the timing
    for ticket, ends in recorder.ends.items():
        assert len(ends) == 1
        if ticket not in finished and ends != ["refused"]:
            assert ends[0][0] is ErrorCode.UNAVAILABLE


def test_a_request_for_no_tokens_passes_a_full_queue(attach):
    client, recorder = attach(max_running_requests=1, max_queued_requests=1)
    for ticket in (1, 2):
        client.submit(ticket, ENDLESS)
        wait_until(lambda ticket=ticket: client.board.running + client.board.queued == ticket)
    with pytest.raises(Unavailable):
        client.submit(3, greedy([1], 1))
    client.submit(4, greedy([1], 0))
    recorder.wait(lambda: 4 in recorder.ends)
    assert recorder.ends == {4: [FinishReason.LENGTH]}


def test_who_is_prepared_for_a_free_row_fills_no_queue(attach, monkeypatch):
    client, recorder = attach(max_running_requests=2, max_queued_requests=1)
    monkeypatch.setattr(Board, "queued", property(lambda board: 1))
    client.submit(1, greedy([1], 1))
    recorder.wait(lambda: 1 in recorder.ends)
    assert recorder.ends == {1: [FinishReason.LENGTH]}
    monkeypatch.setattr(Board, "running", property(lambda board: 2))
    with pytest.raises(Unavailable, match="the queue is full"):
        client.submit(2, greedy([1], 1))
