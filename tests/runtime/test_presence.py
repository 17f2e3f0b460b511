"""Files that say who is there."""

import os
import stat
import subprocess

import pytest

from mstar.runtime.presence import EngineRecord, base_folder, crashed, engine_folders, open_engine_folder, server_folder
from mstar.runtime.processes import ExitWatch, is_alive, start_ticks
from mstar.utils.errors import LoadError


@pytest.fixture(autouse=True)
def runtime_folder(socket_folder, monkeypatch):
    folder = socket_folder / "base"
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def sleeper():
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


def test_a_process_is_known_by_pid_and_start(sleeper):
    started = start_ticks(sleeper.pid)
    assert is_alive(sleeper.pid, started)
    assert not is_alive(sleeper.pid, started + 1)
    watch = ExitWatch(sleeper.pid, started)
    assert not watch.has_ended()
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert watch.has_ended()
    watch.close()


def test_engines_are_told_apart_by_server_name_and_options():
    paths = {
        open_engine_folder(pid, name, key).path
        for pid, name, key in ((os.getpid(), "a", "1"), (os.getpid(), "b", "1"), (os.getpid(), "a", "2"), (1, "a", "1"))
    }
    assert len(paths) == 4
    assert stat.S_IMODE(base_folder().stat().st_mode) == 0o700


def test_an_odd_name_is_a_safe_path():
    folder = open_engine_folder(os.getpid(), "../../etc/" + "x" * 300, "k")
    assert folder.path.parent == server_folder(os.getpid())


def test_a_folder_that_cannot_be_used_is_a_load_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(LoadError, match="MSTAR_RUNTIME_DIR"):
        open_engine_folder(os.getpid(), "a", "k")
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(LoadError, match="too long for a socket"):
        open_engine_folder(os.getpid(), "a", "k")


def test_crashed_lists_the_dead_that_did_not_sign_off(sleeper):
    folder = open_engine_folder(os.getpid(), "a", "k")
    folder.sign_on("front")
    record = EngineRecord(pid=sleeper.pid, started=start_ticks(sleeper.pid), name="a")
    folder.write_engine(record)
    assert crashed(os.getpid()) == []
    sleeper.kill()
    sleeper.wait()
    assert crashed(os.getpid()) == [f"engine a (pid {sleeper.pid})"]
    folder.write_engine(record.signed_off())
    assert crashed(os.getpid()) == []
    folder.sign_off("front")
    folder.sign_off("front")
    assert not folder.has_living_fronts()


def test_folders_of_servers_that_are_gone_are_removed(sleeper):
    old = open_engine_folder(sleeper.pid, "a", "k")
    sleeper.kill()
    sleeper.wait()
    new = open_engine_folder(os.getpid(), "a", "k")
    assert not old.path.exists()
    assert engine_folders(os.getpid()) == [new]
