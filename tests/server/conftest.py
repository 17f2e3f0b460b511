"""One real server for all tests of this folder, with the shipped model and the echo engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving_client import ServerProcess

from mstar.serving.pbtxt import render_config

SHIPPED = Path(__file__).resolve().parents[2] / "model_repository" / "smollm2"


def write_echo_entry(repository: Path, instances: int = 1, **options: str) -> None:
    """A repository entry whose engine repeats the prompt."""
    version = repository / "echo" / "1"
    version.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("echo_engine.py"), version / "model.py")
    (repository / "echo" / "config.pbtxt").write_text(
        render_config({"model": "smollm2-135m", **options}, instances=instances)
    )


def write_model_entry(repository: Path, name: str, **options: str) -> None:
    """A repository entry of SmolLM2."""
    shutil.copytree(SHIPPED / "1", repository / name / "1", ignore=shutil.ignore_patterns("__pycache__"))
    config = render_config({"model": "smollm2-135m", "device": "auto", **options})
    (repository / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="session")
def write_entry() -> Callable[..., None]:
    return write_model_entry


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The shipped entry as it is, and one that shares its engine."""
    repository = tmp_path_factory.mktemp("model_repository")
    shutil.copytree(SHIPPED, repository / "smollm2", ignore=shutil.ignore_patterns("__pycache__"))
    write_model_entry(repository, "brief", engine="smollm2", default_max_tokens="24", default_temperature="0")
    server = ServerProcess(repository, tmp_path_factory.mktemp("model_server"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("echo_repository")
    write_echo_entry(repository)
    server = ServerProcess(repository, tmp_path_factory.mktemp("echo_server"))
    yield server
    server.stop()
