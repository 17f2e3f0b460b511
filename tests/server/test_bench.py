"""``mstar bench serve`` against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving_client import ServerProcess
from typer.testing import CliRunner

from mstar.cli.main import app

pytestmark = [pytest.mark.server, pytest.mark.model]


def test_a_sweep_answers_every_request_and_writes_table_json_and_plot(
    model_server: ServerProcess, tmp_path: Path
) -> None:
    arguments = ["--url", model_server.grpc_address, "--concurrency", "1,3", "--requests", "3"]
    arguments += ["--input-len", "5", "--output-len", "4", "--json", f"{tmp_path}/b.json", "--png", f"{tmp_path}/b.png"]
    result = CliRunner().invoke(app, ["bench", "serve", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for heading in ("req/s", "tok/s", "TTFT", "inter-token"):
        assert heading in result.stdout
    levels = json.loads((tmp_path / "b.json").read_text())["levels"]
    assert [(level["concurrency"], level["requests"], level["errors"]) for level in levels] == [(1, 3, 0), (3, 3, 0)]
    for level in levels:
        assert level["output_tokens_per_s"] == pytest.approx(4 * level["requests_per_s"])
        assert 0 < level["ttft_ms"][0] <= level["e2e_ms"][0]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_that_refuses_is_an_exit_code(model_server: ServerProcess) -> None:
    arguments = ["--url", model_server.grpc_address, "--concurrency", "1", "--requests", "1", "--input-len", "8192"]
    assert CliRunner().invoke(app, ["bench", "serve", *arguments]).exit_code == 1
