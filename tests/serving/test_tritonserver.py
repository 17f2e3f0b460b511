"""Finding a server, its environment, and its command line."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mstar.serving import tritonserver
from mstar.serving.tritonserver import (
    ServerInstall,
    ServerOptions,
    check_numpy,
    find_models,
    find_server,
    join_paths,
    prepare_backend,
    server_arguments,
    server_environment,
)
from mstar.utils.errors import LoadError

OPTIONS = ServerOptions(Path("/models"), ("a", "b"), 8000, 8001, 8002)


def make_executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_server_on_path_goes_before_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = make_executable(tmp_path / "bin" / "tritonserver")
    monkeypatch.setenv("PATH", join_paths([str(binary.parent)], os.environ["PATH"]))
    assert find_server() == ServerInstall(binary)


def test_server_of_the_image_goes_before_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = make_executable(tmp_path / "tritonserver" / "bin" / "tritonserver")
    monkeypatch.setattr(tritonserver, "IMAGE_BINARY", binary)
    assert find_server() == ServerInstall(binary)


def test_wheel_server_is_found_without_importing_pytriton() -> None:
    install = find_server()
    if install.wheel_root is None:
        pytest.skip("another server is installed")
    assert os.access(install.binary, os.X_OK)
    assert "pytriton" not in sys.modules


def test_no_server_names_the_places_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "find_wheel", lambda: None)
    with pytest.raises(LoadError, match=r"PATH.*/opt/tritonserver.*pip install"):
        find_server()


def test_given_binary_must_be_executable(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").write_text("")
    with pytest.raises(LoadError, match="not an executable"):
        find_server(tmp_path / "tritonserver")


def test_backend_folder_has_the_stub_of_this_python_with_its_run_bit(tmp_path: Path) -> None:
    root = tmp_path / "wheel"
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name in ("backends/python/libtriton_python.so", "backends/python/triton_python_backend_utils.py"):
        make_executable(root / name)
    stub = make_executable(root / "python_backend_stubs" / minor / "triton_python_backend_stub")
    stub.chmod(0o644)  # as an installer that drops the bit leaves it
    folder = prepare_backend(ServerInstall(root / "bin/tritonserver", root), tmp_path / "work")
    assert folder == tmp_path / "work" / "backends"
    assert os.access(folder / "python" / stub.name, os.X_OK)
    assert (folder / "python" / "libtriton_python.so").exists()
    assert (folder / "python" / "triton_python_backend_utils.py").exists()


def test_missing_stub_names_the_pythons_the_wheel_knows(tmp_path: Path) -> None:
    make_executable(tmp_path / "python_backend_stubs" / "3.8" / "triton_python_backend_stub")
    with pytest.raises(LoadError, match=r"only for 3\.8"):
        prepare_backend(ServerInstall(tmp_path / "bin/tritonserver", tmp_path), tmp_path)


def test_full_installation_keeps_its_own_backends(tmp_path: Path) -> None:
    assert prepare_backend(ServerInstall(tmp_path / "tritonserver"), tmp_path) is None


@pytest.mark.parametrize("found", ["2.0.0", "2.3.1", "3.0"])
def test_numpy_2_is_refused_with_the_remedy(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "version", lambda name: found)
    with pytest.raises(LoadError, match=rf"numpy < 2, got {found}.*numpy>=1\.26,<2"):
        check_numpy()


def test_environment_makes_python3_this_interpreter(tmp_path: Path) -> None:
    env = server_environment(ServerInstall(tmp_path / "tritonserver"), {"PATH": "/usr/bin", "PYTHONPATH": "/mine"})
    assert env["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin"]
    assert env["MSTAR_PYTHON"] == sys.executable
    assert env["PYTHONPATH"].split(":")[-1] == "/mine"
    assert str(Path(tritonserver.__file__).parents[2]) in env["PYTHONPATH"].split(":")
    assert env["TOKENIZERS_PARALLELISM"] == "false"
    assert "LD_LIBRARY_PATH" not in env


def test_environment_of_the_wheel_has_the_python_library() -> None:
    install = find_server()
    if install.wheel_root is None:
        pytest.skip("another server is installed")
    folders = [Path(folder) for folder in server_environment(install, {})["LD_LIBRARY_PATH"].split(":")]
    assert any(any(folder.glob("libpython3*.so*")) for folder in folders[1:])
    assert folders[0].name == "nvidia_pytriton.libs"


def test_missing_python_library_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "python_library_dir", lambda: None)
    with pytest.raises(LoadError, match=r"apt-get install libpython3\.\d+"):
        server_environment(ServerInstall(tmp_path / "tritonserver", tmp_path / "a" / "b"), {})


def test_every_model_is_loaded_explicitly() -> None:
    arguments = server_arguments(OPTIONS)
    assert "--model-control-mode=explicit" in arguments
    assert [argument for argument in arguments if "load-model" in argument] == ["--load-model=a", "--load-model=b"]


@pytest.mark.parametrize(
    ("extra", "present", "absent"),
    [
        (["--log-verbose=1"], "--log-verbose=1", None),
        (["--log-verbose", "1"], "--log-verbose=1", None),
        (["--exit-timeout-secs=5"], "--exit-timeout-secs=5", "--exit-timeout-secs=60"),
        (
            ["--backend-config=python,thread-pool-size=8"],
            "--backend-config=python,thread-pool-size=8",
            "--backend-config=python,thread-pool-size=64",
        ),
        (
            ["--backend-config=python,thread-pool-size=8"],
            "--backend-config=python,stub-timeout-seconds=120",
            None,
        ),
        (["--model-control-mode=poll"], "--model-control-mode=poll", "--load-model=a"),
        (["--load-model=c"], "--load-model=a", None),
        (["--disable-auto-complete-config"], "--disable-auto-complete-config", None),
    ],
)
def test_server_flags_are_passed_through_and_replace_ours(extra: list[str], present: str, absent: str | None) -> None:
    arguments = server_arguments(OPTIONS, extra=extra)
    assert present in arguments
    assert absent is None or absent not in arguments


def test_information_is_logged_unless_a_person_watches() -> None:
    assert "--log-info=true" in server_arguments(OPTIONS)
    assert "--log-info=false" in server_arguments(replace(OPTIONS, log_info=False))


@pytest.mark.parametrize("has_gpu", [False, True])
def test_gpu_metrics_are_off_where_there_is_no_gpu(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tritonserver, "GPU_DEVICES", (tmp_path if has_gpu else tmp_path / "absent",))
    assert ("--allow-gpu-metrics=false" in server_arguments(OPTIONS)) is not has_gpu


@pytest.mark.parametrize("extra", [["--http-port=1"], ["--grpc-port", "1"], ["--model-repository=/x"]])
def test_flags_the_launcher_must_know_are_refused_by_name(extra: list[str]) -> None:
    with pytest.raises(LoadError, match=rf"--{extra[0][2:].partition('=')[0]}: set it with an option"):
        server_arguments(OPTIONS, extra=extra)


def test_word_that_is_no_flag_is_refused() -> None:
    with pytest.raises(LoadError, match="smollm2: a server flag starts with --"):
        server_arguments(OPTIONS, extra=["smollm2"])


def test_models_are_the_folders_with_a_config(tmp_path: Path) -> None:
    for name in ("zeta", "alpha"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text("")
    (tmp_path / "notes").mkdir()
    assert find_models(tmp_path) == ("alpha", "zeta")


@pytest.mark.parametrize("name", ["", "absent"])
def test_repository_without_models_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LoadError, match="--repository: "):
        find_models(tmp_path / name)


def test_a_python_model_without_model_py_is_named_before_the_server_starts(tmp_path):
    (tmp_path / "half" / "1").mkdir(parents=True)
    (tmp_path / "half" / "config.pbtxt").write_text('name: "half"\nbackend: "python"\n')
    with pytest.raises(LoadError, match=r"half has no .*model\.py"):
        find_models(tmp_path)
    (tmp_path / "half" / "1" / "model.py").touch()
    assert find_models(tmp_path) == ("half",)
