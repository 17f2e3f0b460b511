"""What the launcher sees of engines through their files."""

import os
import subprocess
import sys
import time

import pytest

from mstar.runtime.board import Board, EngineState, Slot
from mstar.runtime.presence import EngineRecord, open_engine_folder
from mstar.runtime.processes import start_ticks
from mstar.serving import watch
from mstar.serving.watch import Presence


@pytest.fixture
def engine(socket_folder, monkeypatch):
    """A process that stands for an engine of this one, with its folder and board."""
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(socket_folder))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    folder = open_engine_folder(os.getpid(), "toy", "0" * 12)
    folder.write_engine(EngineRecord(pid=process.pid, started=start_ticks(process.pid) or 0, name="toy"))
    board = Board.create(folder.board_path)
    board[Slot.STATE] = EngineState.READY
    yield process, folder, board
    process.kill()
    process.wait()


def looks(presence, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if lost := presence.lost():
            return lost
        time.sleep(0.01)
    return []


def test_an_engine_without_a_beat_is_lost_though_it_lives(engine, monkeypatch):
    process, _, board = engine
    monkeypatch.setattr(watch, "BEAT_STALE_S", 0.3)
    presence = Presence(os.getpid())
    board.beat()
    assert looks(presence, 0.15) == []
    [text] = looks(presence, 5.0)
    assert text == f"engine toy (pid {process.pid}), no beat for 0.3 s"


def test_an_engine_that_loads_for_long_is_not_lost_and_watched_once_it_is_ready(engine, monkeypatch):
    process, _, board = engine
    monkeypatch.setattr(watch, "BEAT_STALE_S", 0.1)
    board[Slot.STATE] = EngineState.STARTING
    presence = Presence(os.getpid())
    assert looks(presence, 0.5) == []
    board[Slot.STATE] = EngineState.READY
    assert looks(presence, 5.0) == [f"engine toy (pid {process.pid}), no beat for 0.1 s"]


def test_the_board_of_an_engine_that_left_is_not_its_successors(engine, monkeypatch):
    _, folder, board = engine
    monkeypatch.setattr(watch, "BEAT_STALE_S", 0.1)
    presence = Presence(os.getpid())
    assert presence.lost() == []
    board[Slot.STATE] = EngineState.EXITED  # its process is the next engine's by now, which still imports
    assert looks(presence, 0.3) == []
    successor = Board.create(folder.board_path)
    successor[Slot.STATE] = EngineState.READY
    for _ in range(30):
        successor.beat()
        assert presence.lost() == []
        time.sleep(0.01)


def test_draining_engines_are_told_and_seen_to_leave(engine):
    process, _, _ = engine
    presence = Presence(os.getpid())
    assert presence.has_live_engines()
    assert presence.drain_engines()
    process.wait(10)
    assert not presence.has_live_engines()
    assert not presence.drain_engines()


def test_a_killed_engine_is_lost_by_name(engine):
    process, _, _ = engine
    presence = Presence(os.getpid())
    process.kill()
    process.wait()
    assert presence.lost() == [f"engine toy (pid {process.pid})"]
