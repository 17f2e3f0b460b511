"""``mstar bench sampler``: every feature on every row of a batch, through the resources that serve requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mstar.cli.bench.sampler import FEATURES, measure
from mstar.cli.bench.sampling_rig import SamplingRig
from mstar.cli.main import app
from mstar.engine.resources.sampler.config import SamplingReqConfig


def test_every_feature_is_measured_and_all_of_them_cost_more_than_none() -> None:
    cost = measure(rows=4, vocab_size=512, steps=3, decode_s=0.002)
    assert cost.ms.keys() == FEATURES.keys()
    assert cost.decode_ms == 2
    assert cost.ms["all of it"] > cost.ms["greedy"]


def test_a_rig_can_be_used_again_with_other_requests() -> None:
    rig = SamplingRig(3, 512)
    for _ in range(2):
        assert len(rig.step_seconds({"sampler": SamplingReqConfig(repetition_penalty=1.5)}, 3)) == 3
    assert rig.resources["sampler"].offset_of(0) == 5, "two steps to warm up, three measured"
    assert len(rig.step_seconds(FEATURES["regex"], 3)) == 3


def test_the_table_and_the_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "sampler.json"
    arguments = ["--rows", "1,2", "--vocabularies", "256,300", "--steps", "3", "--model", "", "--json", str(file)]
    result = CliRunner().invoke(app, ["bench", "sampler", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert [(entry["vocab_size"], entry["rows"]) for entry in record] == [(256, 1), (256, 2), (300, 1), (300, 2)]
    for entry in record:
        assert f"{entry['ms']['all of it']:.2f}" in result.stdout
    for name in FEATURES:
        assert name in result.stdout


@pytest.mark.parametrize(("option", "value"), [("--vocabularies", "255"), ("--rows", "0"), ("--steps", "2")])
def test_a_size_that_makes_no_sense_is_a_usage_error(option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["bench", "sampler", "--model", "", option, value])
    assert result.exit_code == 2
    assert option in result.output
