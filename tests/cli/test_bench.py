"""``mstar bench``: what it counts and writes, on a model that runs in no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runtime.tiny import write_checkpoint
from typer.testing import CliRunner

from mstar.cli.bench import offline
from mstar.cli.bench.serve import PERCENTILES, Trace, summarise
from mstar.cli.main import app


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_offline_measures_every_batch_size_beside_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "read_bandwidth", lambda device: 1e9)
    model, file = write_checkpoint(tmp_path / "tiny"), tmp_path / "bench.json"
    sizes = ["--batch-sizes", "1,3", "--input-len", 8, "--output-len", 6, "--repeats", 1]
    table = run("offline", "--model", model, "--device", "cpu", *sizes, "--threads", 1, "--compare", "--json", file)
    for heading in ("tok/s", "ms/step", "floor ms", "% of floor", "peak MB", "ratio", "rows equal"):
        assert heading in table
    record = json.loads(file.read_text())
    assert record["engine"]["dtype"] == "float32"
    assert [result["rows"] for result in record["results"]] == [1, 3]
    for result in record["results"]:
        # What a step reads: the weights, and keys and values (32 numbers each) of half the answer on average.
        moved = record["engine"]["weight_bytes"] + result["rows"] * (8 + 6 / 2) * 2 * 32 * 4
        assert result["floor_ms"] == pytest.approx(moved / 1e9 * 1e3)
        assert result["equal_tokens"] == 1.0
        assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["peer_tokens_per_s"])
        assert result["step_ms"] > 0
        assert result["peak_mb"] > 0


@pytest.mark.parametrize("command", [["offline", "--batch-sizes", "1,x"], ["serve", "--concurrency", "0"]])
def test_a_list_that_holds_no_counts_is_refused_by_option(command: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *command])
    assert result.exit_code == 2
    assert command[1] in result.output


def test_a_level_counts_tokens_of_joined_responses_and_leaves_errors_out() -> None:
    traces = [
        Trace(sent=0.0, arrivals=[1.0, 2.0, 4.0], tokens=[1, 1, 4], finished=4.0),
        Trace(sent=1.0, arrivals=[2.0], tokens=[6], finished=2.5),
        Trace(sent=0.0, error="refused", finished=1.0),
    ]
    level = summarise(2, traces, seconds=5.0)
    assert (level.requests, level.errors) == (3, 1)
    assert (level.requests_per_s, level.output_tokens_per_s, level.tokens_per_response) == (0.4, 2.4, 3.0)
    assert PERCENTILES == (50, 90, 99)
    assert level.ttft_ms[0] == pytest.approx(1000.0)
    assert level.itl_ms == pytest.approx((600.0,) * 3)  # three seconds for five tokens after the first
    assert level.e2e_ms[0] == pytest.approx(2750.0)
