"""``mstar bench trace``: traces on a real engine that computes next to nothing, told as a simulation is."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mstar.cli.main import app
from mstar.simulate.summary import Summary
from tests.runtime.tiny import write_checkpoint

SMALL = ["--requests", "12", "--prompt-tokens", "40", "--output-tokens", "6"]
FIRST = "device=cpu, num_threads=1, max_running_requests=4, max_batch_tokens=16"


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "trace", *map(str, arguments)])


def options(text):
    return [f"--option={each}" for each in text.split(", ")]


def test_engines_take_turns_at_every_trace_and_each_run_is_told(tmp_path):
    model, file = write_checkpoint(tmp_path / "tiny"), tmp_path / "runs.json"
    others = ["mixed_steps=false", "max_batch_tokens=64,run_ahead=on"]
    versus = [f"--versus={each}" for each in others]
    compared = [*options(FIRST), *versus, "--rate", "500,1000", "--repeats", 2, "--tenants", 2]
    result = run("--model", model, *SMALL, *compared, "--json", file)
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    names = [FIRST, *others]
    assert list(record["engines"]) == names
    turns = [(trace, name, turn) for trace in ("500/s", "1000/s") for turn in (0, 1) for name in names[:: 1 - 2 * turn]]
    assert [(each["trace"], each["options"], each["repeat"]) for each in record["runs"]] == turns
    for each in record["runs"]:
        summary = each["summary"]
        assert set(summary) == set(Summary.__struct_fields__), "as a simulation tells it"
        assert summary["ended"] == {"length": 12}
        assert 0 < summary["ttft"]["p50"] <= summary["ttft"]["p99"] <= summary["end_to_end"]["max"]
        assert 0 < summary["itl"]["p50"] <= summary["itl"]["p99"]
        assert 0 < summary["device_share"] <= 1
        assert set(summary["tenants"]) == {"tenant 1", "tenant 2"}
        assert ("mixed" in summary["steps"]) is (each["options"] != "mixed_steps=false")
    assert result.stdout.count("12 length") == len(turns)
    table = result.stdout[result.stdout.index("medians of the repeats") :].splitlines()
    assert [line.split()[0] for line in table[3:]] == ["500/s"] * 3 + ["1000/s"] * 3


def test_requests_with_one_system_prompt_share_it(tmp_path):
    model, file = write_checkpoint(tmp_path / "tiny"), tmp_path / "runs.json"
    systems = ["--trace", "systems", "--systems", 2, "--system-tokens", 200, "--rate", 500]
    result = run("--model", model, *SMALL, *options(FIRST), *systems, "--json", file)
    assert result.exit_code == 0, result.output
    (only,) = json.loads(file.read_text())["runs"]
    assert only["summary"]["ended"] == {"length": 12}
    assert only["summary"]["cached_share"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trace", "nonsense"], "--trace: poisson"),
        (["--trace", "/nowhere/x.jsonl"], "/nowhere/x.jsonl"),
        (["--rate", "1,x"], "--rate"),
        (["--rate", "0"], "--rate"),
        (["--rate", "inf"], "--rate"),
        (["--clock", "sun"], "--clock: wall or cpu"),
        (["--clock", "cpu", "--option", "device=cpu"], "num_threads=1"),
        (["--versus", "mixed_steps"], "--versus: NAME=VALUE"),
        (["--versus", "max_batch_tokens=0"], "max_batch_tokens"),
        (["--system-skew", "-1"], "--system-skew"),
        (["--json", "/nowhere/x.json"], "--json"),
    ],
)
def test_what_is_wrong_is_named_before_a_model_is_loaded(arguments, told):
    result = run("--model", "/nowhere/model", *arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert "/nowhere/model" not in result.output
