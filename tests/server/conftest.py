"""The real servers of this folder: the shipped model, the same with tokens that are always equal, the echo engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from repository_entries import SHIPPED, write_echo_entry, write_model_entry
from serving_client import ServerProcess


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
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Deterministic, with few rows and short steps."""
    repository = tmp_path_factory.mktemp("exact_repository")
    limits = {"max_running_requests": "12", "max_batch_tokens": "128", "max_seq_len": "2048"}
    write_model_entry(repository, "smollm2", deterministic="true", **limits)
    server = ServerProcess(repository, tmp_path_factory.mktemp("exact_server"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("echo_repository")
    write_echo_entry(repository)
    server = ServerProcess(repository, tmp_path_factory.mktemp("echo_server"))
    yield server
    server.stop()
