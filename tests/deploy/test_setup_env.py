"""The set-up script: what it says is missing, and what it shows of pip's work."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "build" / "setup_env.py"


@pytest.fixture
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_this_machine_lacks_nothing() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), "--missing"], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_missing_tools_are_named_with_the_command_that_installs_them(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env.shutil, "which", lambda tool: None)
    monkeypatch.setattr(setup_env, "can_import", lambda name: name != "ensurepip")
    with pytest.raises(SystemExit, match=r"sudo apt-get install -y python3\.\d+-venv make curl$"):
        setup_env.check_packages()


@pytest.mark.parametrize("version", [(3, 10, 12), (3, 14, 0)])
def test_unfit_python_is_refused_with_a_way_out(
    version: tuple[int, ...], setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env.sys, "version_info", version)
    with pytest.raises(SystemExit, match=r"3\.11 to 3\.13.*\n.*apt-get install.*\n.*make demo PYTHON="):
        setup_env.check_version()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Collecting torch==2.13.0", "collecting torch==2.13.0"),
        ("  Downloading https://host/path/torch-2.13.0.whl (10.0 MB)", "downloading torch-2.13.0.whl (10.0 MB)"),
        ("  Downloading numpy-1.26.4.whl", "downloading numpy-1.26.4.whl"),
        ("Installing collected packages: a, b, c", "installing"),
        ("  Installing build dependencies: started", ""),
        ("  Building wheel for mstar-triton (pyproject.toml): started", "building mstar-triton"),
        ("  Building editable for x", ""),
        ("Requirement already satisfied: numpy", ""),
        ("", ""),
    ],
)
def test_pip_output_in_a_few_words(setup_env: ModuleType, line: str, shown: str) -> None:
    assert setup_env.describe(line) == shown


def test_second_run_installs_nothing(setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = {"identity": setup_env.identity(), "fingerprint": setup_env.fingerprint(), "extras": ["server", "test"]}
    monkeypatch.setattr(setup_env, "STAMP", tmp_path / "stamp.json")
    setup_env.STAMP.write_text(json.dumps(stamp))
    installed: list[set[str]] = []
    monkeypatch.setattr(setup_env, "install", installed.append)
    for arguments in ([], ["--extras", "test"]):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        setup_env.main()
    assert installed == []


@pytest.mark.parametrize("changed", ["identity", "fingerprint", "extras"])
def test_moved_changed_or_smaller_environment_is_installed_again(
    changed: str, setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = {"identity": setup_env.identity(), "fingerprint": setup_env.fingerprint(), "extras": ["server", "test"]}
    monkeypatch.setattr(setup_env, "STAMP", tmp_path / "stamp.json")
    setup_env.STAMP.write_text(json.dumps({**stamp, changed: []}))
    installed: list[set[str]] = []
    monkeypatch.setattr(setup_env, "install", installed.append)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--extras", "test"])
    setup_env.main()
    assert installed == [{"server", "test"}]
