"""A server with a real engine, told to stop while clients are connected."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from repository_entries import write_model_entry
from serving_client import GrpcStream, ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.model]


def test_requests_past_the_drain_time_end_unavailable_and_idle_streams_hold_nothing_up(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model_entry(repository, "short_drain", drain_timeout_s="1")
    server = ServerProcess(repository, tmp_path, exit_timeout_s=30)
    with GrpcStream(server, "short_drain") as idle, GrpcStream(server, "short_drain") as busy:
        idle.send({"text_input": "Hello", "max_tokens": 1})
        assert idle.collect().finish_reason == "length"
        busy.send({"text_input": "Once", "stream": True, "max_tokens": 4000, "ignore_eos": True, "temperature": 0.0})
        busy.receive()
        started = time.monotonic()
        server.process.terminate()
        answer = busy.collect()
        assert answer.error is not None
        assert "shutting down" in answer.error
        assert 0.5 < time.monotonic() - started < 10
        assert server.process.wait(20) == 0


def test_a_killed_engine_ends_the_server_soon_though_a_stream_stays_open(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model_entry(repository, "doomed")
    server = ServerProcess(repository, tmp_path, ["--grace", "1"], exit_timeout_s=60)
    with GrpcStream(server, "doomed") as idle:
        idle.send({"text_input": "Hello", "max_tokens": 1})
        assert idle.collect().finish_reason == "length"
        [engine] = [p for p in psutil.process_iter(["cmdline"]) if is_engine_of(p, server.pid)]
        engine.kill()
        assert server.process.wait(20) == 1


def is_engine_of(process: psutil.Process, server_pid: int) -> bool:
    command = process.info["cmdline"] or []
    return "mstar.runtime.engine_process" in command and str(server_pid) in command
