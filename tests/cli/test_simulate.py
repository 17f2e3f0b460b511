"""``mstar simulate``: traces in, tables, files and pictures out."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from mstar.cli.main import app
from mstar.simulate.measured import load
from tests.runtime.tiny import write_checkpoint

SMALL = ["--requests", "40", "--rate", "400", "--prompt-tokens", "40", "--output-tokens", "10"]


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_without_a_name_it_runs(tmp_path):
    file = tmp_path / "results.json"
    result = run(*SMALL, "--json", str(file), "--tenants", "2")
    assert result.exit_code == 0, result.output
    assert re.search(r"error of a step:\n +all +median \d", result.stdout)
    assert re.search(r"first token, ms +p50 \d", result.stdout)
    summary = json.loads(file.read_text())["defaults"]
    assert summary["ended"] == {"length": 40}
    assert set(summary["tenants"]) == {"tenant 1", "tenant 2"}


def test_runs_of_one_trace_are_compared_and_drawn(tmp_path):
    trace, picture, file = tmp_path / "trace.jsonl", tmp_path / "runs.svg", tmp_path / "results.json"
    assert run(*SMALL, "--trace", "bursts", "--save-trace", str(trace)).exit_code == 0
    given = ["--option", "max_batch_tokens=64", "--versus", "mixed_steps=false,max_steps_ahead=1"]
    result = run("--trace", str(trace), *given, "--plot", str(picture), "--json", str(file))
    assert result.exit_code == 0, result.output
    results = json.loads(file.read_text())
    assert list(results) == ["max_batch_tokens=64", "mixed_steps=false,max_steps_ahead=1"]
    mixed, apart = results.values()
    assert "mixed" in mixed["steps"]
    assert "mixed" not in apart["steps"]
    assert mixed["requests"] == apart["requests"] == 40
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trace", "nonsense"], "--trace: poisson"),
        (["--steps", "nonsense"], "shipped are"),
        (["--option", "max_batch_tokens=0"], "max_batch_tokens"),
        (["--option", "kv_memory_bytes=1"], "kv_memory_bytes: must be at least"),
        (["--versus", "mixed_steps"], "--versus: NAME=VALUE"),
        (["--versus", "max_batch_tokens=0"], "max_batch_tokens"),
        (["--versus", "kv_memory_bytes=1"], "kv_memory_bytes: must be at least"),
        (["--trace", "systems", "--systems", "0"], "--systems"),
        (["--json", "/nowhere/x.json"], "--json"),
    ],
)
def test_what_is_wrong_is_named(arguments, told):
    result = run(*SMALL, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "simulated in" not in result.stdout  # before anything was played


def test_system_prompts_are_shared_as_asked(tmp_path):
    file = tmp_path / "results.json"
    systems = ["--trace", "systems", "--systems", "4", "--system-tokens", "300", "--system-skew", "1"]
    versus = ["--versus", "prefix_cache=false"]
    assert run(*SMALL, *systems, *versus, "--json", str(file)).exit_code == 0
    shared, alone = json.loads(file.read_text()).values()
    assert shared["cached_share"] > 0.7 > alone["cached_share"] == 0


def test_steps_of_a_real_engine_are_measured(tmp_path):
    file, model = tmp_path / "steps.json", write_checkpoint(tmp_path / "model")
    options = ["max_running_requests=4", "num_threads=1", "max_batch_tokens=128", "max_seq_len=512"]
    result = run("fit", "--model", str(model), "--out", str(file), *(f"--option={option}" for option in options))
    assert result.exit_code == 0, result.output
    for line in ("held out", "host", "whole"):
        assert re.search(rf"{line} +median \d", result.stdout), line
    assert re.search(r"device, µs +step \d", result.stdout)
    measured = load(str(file))
    assert {step.composition.kind for step in measured.steps} == {"decode", "prefill", "mixed"}
    assert max(step.decode_rows for step in measured.steps) == 4
    assert all(step.ms > 0 for step in measured.steps)
    assert measured.kv_token_bytes == 2 * 32 * 4
    assert run(*SMALL, "--steps", str(file), "--option", "max_running_requests=4").exit_code == 0
