"""The environment an engine process gets."""

from pathlib import Path

import pytest

import mstar
from mstar.runtime.cpus import physical_cores
from mstar.runtime.launch import SPIN_COUNT, engine_environment, engine_python
from mstar.utils.errors import LoadError


def test_the_stubs_loader_and_interpreter_settings_stay_behind():
    given = {"LD_LIBRARY_PATH": "/x", "PYTHONHOME": "/x", "PYTHONPATH": "/x", "LD_PRELOAD": "/x", "PATH": "/bin",
             "HF_HOME": "/cache", "MSTAR_NUM_SLOTS": "2", "CUDA_VISIBLE_DEVICES": "1", "https_proxy": "p"}  # fmt: skip
    environ = engine_environment(given)
    assert not environ.keys() & {"LD_LIBRARY_PATH", "PYTHONHOME", "LD_PRELOAD"}
    kept = {"PATH", "HF_HOME", "MSTAR_NUM_SLOTS", "CUDA_VISIBLE_DEVICES", "https_proxy"}
    assert all(environ[name] == given[name] for name in kept)
    assert environ.get("PYTHONPATH") in (None, str(Path(mstar.__file__).resolve().parents[1]))


def test_threads_spin_briefly_unless_the_operator_says_otherwise():
    assert engine_environment({})["GOMP_SPINCOUNT"] == SPIN_COUNT
    assert engine_environment({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    told = engine_environment({"OMP_WAIT_POLICY": "ACTIVE"})
    assert told["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in told  # it would outdo the policy


def test_the_interpreter_is_named_or_this_prefixs(monkeypatch):
    monkeypatch.delenv("MSTAR_PYTHON", raising=False)
    assert Path(engine_python()).name == "python3"
    monkeypatch.setenv("MSTAR_PYTHON", "/bin/sh")
    assert engine_python() == "/bin/sh"
    monkeypatch.setenv("MSTAR_PYTHON", "/no/python3")
    with pytest.raises(LoadError, match="/no/python3 is not executable; set MSTAR_PYTHON"):
        engine_python()


def test_there_is_a_core():
    assert physical_cores() >= 1
