"""``mstar bench host``: the real conductor and engine around a stub, every phase of a step, and nothing left over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mstar.cli.bench.host import CONDUCTOR, FASTEST, measure
from mstar.cli.main import app
from mstar.utils import knobs

PHASES = {"declare", "admit", "plan", "preprocess", "stage", "commit", "collect", "post_process", "routing", "message"}
TURNS = {"arrivals", "join", "ingest", "ends", "remove"}  # where rows leave and join
WAITING = 10_000
MOST_GROWTH = 1.3  # of the conductor's cost, from an empty queue to one of WAITING requests
TRIES = 6  # on a machine that is busy with other things


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_GRAPH_STRICT", "0")
    for name in FASTEST:
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("run_ahead", [True, False])
def test_the_phases_account_for_the_loop_and_the_replay_is_apart(run_ahead: bool) -> None:
    cost = measure(rows=4, steps=64, run_ahead=run_ahead)
    assert cost.phases_us.keys() >= PHASES | TURNS
    assert "replay" not in cost.phases_us
    assert all(spent > 0 for spent in cost.phases_us.values())
    assert cost.replay_us > 0
    assert 0.9 < cost.covered <= 1.001  # 5% is for a machine that does nothing else
    assert 0 < cost.share <= 1
    assert cost.units == pytest.approx(cost.host_us / cost.unit_us)


def test_every_phase_is_either_the_conductors_or_the_engines() -> None:
    cost = measure(rows=4, steps=64, run_ahead=True, waiting=8, turn=8)
    assert cost.phases_us.keys() >= set(CONDUCTOR)
    assert cost.conductor_us == pytest.approx(sum(cost.phases_us[name] for name in CONDUCTOR))
    assert cost.engine_us >= sum(cost.phases_us[name] for name in ("plan", "commit", "ingest", "remove"))
    assert cost.conductor_us + cost.engine_us == pytest.approx(sum(cost.phases_us.values()))


def test_a_step_costs_the_conductor_no_more_however_many_wait() -> None:
    """A row leaves and another joins at every step; a look through the queue would cost it more than all the rest."""
    ratios = []
    for _ in range(TRIES):
        alone, crowded = (measure(rows=8, steps=256, run_ahead=True, waiting=n, turn=1) for n in (0, WAITING))
        assert crowded.waiting == WAITING
        ratios.append(crowded.conductor_us / crowded.unit_us / (alone.conductor_us / alone.unit_us))
        if ratios[-1] <= MOST_GROWTH:
            return
    pytest.fail(f"with {WAITING} waiting the conductor took {ratios} times as long as with nobody waiting")


def test_the_table_and_the_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    arguments = ["bench", "host", "--rows", "1,3", "--waiting", 5, "--turn", 4, "--steps", 32]
    arguments += ["--settings", "environment", "--json", file]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert [entry["rows"] for entry in record] == [1, 3]
    assert "5 waiting" in result.stdout
    for entry in record:
        assert entry["waiting"] == 5
        assert f"{entry['units']:.2f}" in result.stdout
        assert f"{entry['conductor_us']:.1f}" in result.stdout
        assert f"{entry['engine_us']:.1f}" in result.stdout
    for name in PHASES:
        assert name in result.stdout


def test_the_fastest_settings_are_knobs_of_the_table() -> None:
    assert FASTEST.keys() <= knobs.KNOBS.keys()


def test_settings_that_are_no_choice_are_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "host", "--settings", "slow"])
    assert result.exit_code == 2
    assert "--settings" in result.output
