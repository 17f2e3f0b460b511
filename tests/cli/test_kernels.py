"""``mstar kernels``: what it refuses, and what it lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runtime.tiny import write_checkpoint
from typer.testing import CliRunner

from mstar.cli.main import app
from mstar.kernels.kernel_cache import cache_folder


def run(*arguments: object):
    return CliRunner().invoke(app, ["kernels", *map(str, arguments)], env={"TRITON_CACHE_DIR": ""})


@pytest.mark.parametrize("arch", ["9", "sm_90", "9.0b", ""])
def test_an_architecture_that_is_no_compute_capability_is_refused(arch: str) -> None:
    result = run("build", "--arch", arch)
    assert result.exit_code == 2
    assert "a compute capability such as 9.0a" in result.output


def test_a_model_that_is_not_there_and_an_unknown_option_are_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    result = run("build", "--arch", "9.0a", "--option", "max_row=3")
    assert result.exit_code == 2
    assert "option max_row is unknown" in result.output
    model = write_checkpoint(tmp_path / "tiny")
    result = run("build", "--arch", "9.0a", "--model", model, "--triton-key", tmp_path / "none")
    assert result.exit_code == 2
    assert "--triton-key: no such file" in result.output


def test_the_list_names_our_kernels_and_no_others(tmp_path: Path) -> None:
    meta = {"hash": "ab" * 32, "target": {"arch": 90}, "num_warps": 4, "num_stages": 2, "shared": 1024}
    for name, path in (("_ours", "/x/mstar/kernels/cuda/row_ops.py"), ("_theirs", "/x/torch/other.py")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.json").write_text(json.dumps(meta | {"name": name}))
        (folder / f"{name}.source").write_text(f'loc("{path}":1:2)')
        (folder / f"__grp__{name}.json").write_text("{}")
    listed = run("list", "--cache-dir", tmp_path).output
    (line,) = [line.split() for line in listed.splitlines() if "_ours" in line]
    assert line == ["_ours", "90", "4", "2", "-", "-", "1024", "abababab"]
    assert "_theirs" not in listed


def test_the_cache_is_where_triton_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", "/c")
    assert cache_folder() == Path("/c/.triton/cache")
    monkeypatch.delenv("TRITON_HOME")
    assert cache_folder() == Path.home() / ".triton" / "cache"
