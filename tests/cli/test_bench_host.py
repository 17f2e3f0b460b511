"""``mstar bench host``: the real conductor and engine around a stub, every phase of a step, and nothing left over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mstar.cli.bench.host import FASTEST, measure
from mstar.cli.main import app
from mstar.utils import knobs

PHASES = {"declare", "admit", "plan", "preprocess", "stage", "commit", "collect", "post_process", "routing", "message"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_GRAPH_STRICT", "0")
    for name in FASTEST:
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("run_ahead", [True, False])
def test_the_phases_account_for_the_loop_and_the_replay_is_apart(run_ahead: bool) -> None:
    cost = measure(rows=4, steps=64, run_ahead=run_ahead)
    assert cost.phases_us.keys() >= PHASES
    assert "replay" not in cost.phases_us
    assert all(spent > 0 for spent in cost.phases_us.values())
    assert cost.replay_us > 0
    assert 0.9 < cost.covered <= 1.001  # 5% is for a machine that does nothing else
    assert cost.units == pytest.approx(cost.host_us / cost.unit_us)


def test_the_table_and_the_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    arguments = ["bench", "host", "--rows", "1,3", "--steps", 32, "--settings", "environment", "--json", file]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert [entry["rows"] for entry in record] == [1, 3]
    for entry in record:
        assert f"{entry['units']:.2f}" in result.stdout
    for name in PHASES:
        assert name in result.stdout


def test_the_fastest_settings_are_knobs_of_the_table() -> None:
    assert FASTEST.keys() <= knobs.KNOBS.keys()


def test_settings_that_are_no_choice_are_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "host", "--settings", "slow"])
    assert result.exit_code == 2
    assert "--settings" in result.output
