"""The command line as a whole: what it offers and how it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from mstar import __version__
from mstar.cli.errors import MstarGroup
from mstar.cli.main import app
from mstar.utils.errors import EngineFault, InvalidArgument, LoadError, Unavailable, Unsupported


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_version_is_the_packages():
    assert run("--version").stdout == f"mstar {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "generate", "bench", "repository"])
def test_every_command_explains_itself(command):
    assert command in run("--help").stdout
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("command", ["offline", "serve"])
def test_bench_has_its_two_commands(command):
    assert run("bench", command, "--help").exit_code == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("top_p", "in (0, 1]", 2), 2),
        (LoadError("no\nsuch model"), 2),
        (Unsupported("messages", "a model with a chat template", "x"), 2),
        (Unavailable("full"), 1),
        (EngineFault("broke"), 1),
    ],
)
def test_errors_are_one_line_and_a_code(error, code):
    failing = typer.Typer(cls=MstarGroup)

    @failing.callback()
    def main() -> None: ...

    @failing.command()
    def fail() -> None:
        raise error

    result = CliRunner().invoke(failing, ["fail"])
    assert result.exit_code == code
    assert result.stderr == f"mstar: {' '.join(str(error).splitlines())}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "prompt: exactly one of"),
        (["generate", "--prompt", "a", "--prompt-ids", "1"], "prompt: exactly one of"),
        (["generate", "--prompt", "a", "--temperature", "nan"], "temperature: "),
        (["generate", "--prompt", "a", "--top-p", "0"], "top_p: "),
        (["generate", "--prompt", "a", "--input", "x.jsonl"], "--input: "),
        (["generate", "--input", "/nowhere.jsonl"], "cannot be read"),
        (["generate", "--prompt", "a", "--option", "device"], "--option: NAME=VALUE"),
        (["generate", "--prompt", "a", "--option", "model=x"], "--option: the model"),
        (["generate", "--prompt", "a", "--option", "devise=cpu"], "option devise is unknown"),
        (["generate", "--prompt", "a", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_command_starts_without_torch():
    code = "import sys, mstar.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
