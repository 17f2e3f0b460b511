"""``mstar repository render`` keeps config.pbtxt in step with the tensor contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mstar.cli import repository
from mstar.cli.errors import MstarGroup

SHIPPED = Path(__file__).parents[2] / "model_repository" / "smollm2" / "config.pbtxt"

app = typer.Typer(cls=MstarGroup)
app.add_typer(repository.app, name="repository")


@pytest.fixture
def entry(tmp_path):
    """A folder whose config lacks a tensor and has a block of the user's own."""
    text = SHIPPED.read_text()
    line = next(line for line in text.splitlines() if '"seed"' in line)
    (tmp_path / "config.pbtxt").write_text(text.replace(line + "\n", "") + "# mine\nversion_policy { all { } }\n")
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["repository", "render", *map(str, arguments)])


def test_the_shipped_config_is_up_to_date():
    assert run(SHIPPED.parent, "--check").exit_code == 0
    assert run(SHIPPED.parent).stdout == SHIPPED.read_text()


def test_only_the_tensors_of_a_file_change(entry):
    assert run(entry, "--check").exit_code == 1
    assert run(entry, "--write").exit_code == 0
    assert (entry / "config.pbtxt").read_text() == SHIPPED.read_text() + "# mine\nversion_policy { all { } }\n"
    assert run(entry / "config.pbtxt", "--check").exit_code == 0


def test_a_new_config_takes_its_parameters_from_options():
    result = run("--option", "model=org/name", "--option", "device=cpu")
    assert 'key: "model" value { string_value: "org/name" }' in result.stdout
    assert '\nparameters { key: "device" value { string_value: "cpu" } }' in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--write"], "need the folder"),
        (["--option", "model"], "NAME=VALUE"),
        (["--option", "modle=x"], "option modle is unknown"),
        (["/nowhere/config.pbtxt"], "cannot be read"),
        ([SHIPPED, "--option", "model=x"], "--option is for a new"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_without_tensor_blocks_is_not_touched(tmp_path):
    (tmp_path / "config.pbtxt").write_text('backend: "python"\n')
    result = run(tmp_path, "--write")
    assert (result.exit_code, (tmp_path / "config.pbtxt").read_text()) == (2, 'backend: "python"\n')
