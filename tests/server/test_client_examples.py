"""Every script of client_examples/, run as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving_client import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "client_examples"
QUESTION = "What is the capital of France?"

pytestmark = [pytest.mark.server, pytest.mark.model]


def run_example(name: str, *arguments: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    result = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == exit_code, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def answer(model_server: ServerProcess) -> str:
    """The greedy answer, in one piece."""
    arguments = ["--url", model_server.http_address, "--chat", QUESTION, "--max-tokens", "16"]
    return run_example("http_generate.py", *arguments).stdout.removesuffix("\n")


def test_http_generate_answers(answer: str) -> None:
    assert "Paris" in answer


def test_http_stream_gives_the_same_text(model_server: ServerProcess, answer: str) -> None:
    arguments = ["--url", model_server.http_address, "--chat", QUESTION, "--max-tokens", "16", "--stream"]
    assert run_example("http_generate.py", *arguments).stdout == answer + "\n"


def test_grpc_stream_gives_the_same_text_and_its_speed(model_server: ServerProcess, answer: str) -> None:
    arguments = ["--url", model_server.grpc_address, "--chat", QUESTION, "--max-tokens", "16", "--stats"]
    text, stats = run_example("grpc_stream.py", *arguments).stdout.rstrip("\n").rsplit("\n", 1)
    assert text == answer
    assert re.fullmatch(r"\[\d+ tokens; first after \d+ ms, [\d.]+ tokens/s\]", stats)


def test_seed_makes_a_sampled_answer_repeatable(model_server: ServerProcess) -> None:
    arguments = ["--url", model_server.grpc_address, "--prompt", "Once", "--max-tokens", "8"]
    arguments += ["--temperature", "1", "--seed", "7"]
    first, second = (run_example("grpc_stream.py", *arguments).stdout for _ in range(2))
    assert first == second


def test_curl_gives_one_answer_then_a_stream(model_server: ServerProcess) -> None:
    lines = run_example("curl.sh", model_server.http_address).stdout.splitlines()
    whole = json.loads(lines[1])["text_output"]
    pieces = [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]
    assert whole
    assert "".join(piece["text_output"] for piece in pieces) == whole
    assert pieces[-1]["finish_reason"] in ("stop", "length")


def test_asyncio_answers_every_prompt(model_server: ServerProcess) -> None:
    prompts = ["The sun is", "Water boils at", "A prime number is"]
    lines = run_example(
        "asyncio_many.py", "--url", model_server.grpc_address, "--max-tokens", "8", *prompts
    ).stdout.splitlines()
    assert sorted(line.partition(" -> ")[0] for line in lines[:-1]) == sorted(map(repr, prompts))
    assert lines[-1].startswith("[3 answers, ")


def test_cancel_stops_a_long_answer(model_server: ServerProcess) -> None:
    output = run_example("cancel.py", "--url", model_server.grpc_address, "--after", "3").stdout
    assert "cancelled after 3 responses" in output
    assert output.endswith("[the next request is answered]\n")


def test_structured_output_prints_what_the_schema_describes(model_server: ServerProcess) -> None:
    arguments = ["--url", model_server.grpc_address, "--chat", "Invent a person.", "--seed", "1"]
    text, parsed = run_example("structured_output.py", *arguments).stdout.rstrip("\n").rsplit("\n", 1)
    assert {"name", "age", "likes"} == set(json.loads(text))
    assert parsed == f"[parsed: {json.loads(text)}]"


def test_structured_output_keeps_to_choices(model_server: ServerProcess) -> None:
    arguments = ["--url", model_server.grpc_address, "--chat", "Is water wet?", "--choice", "yes", "no"]
    assert run_example("structured_output.py", *arguments).stdout in ("yes\n", "no\n")


def test_logprobs_show_every_token(model_server: ServerProcess) -> None:
    arguments = ["--url", model_server.http_address, "--prompt", "The capital of France is", "--max-tokens", "3"]
    lines = run_example("logprobs.py", *arguments, "--of-prompt").stdout.splitlines()
    assert lines[0] == "prompt:"
    assert lines.index("answer:") == 5
    assert "' Paris'" in lines[6]
    assert "rank 1" in lines[6]
    assert re.fullmatch(r"\[3 tokens, -[\d.]+ in all\]", lines[-1])


def test_sampling_streams_texts_side_by_side(model_server: ServerProcess) -> None:
    arguments = ["--url", model_server.grpc_address, "--prompt", "Once upon a time", "--max-tokens", "6"]
    arguments += ["--n", "3", "--seed", "7"]
    lines = run_example("sampling.py", *arguments).stdout.splitlines()
    assert len(set(lines)) == 3
    assert all(line.endswith(("[length]", "[stop]")) for line in lines)
    assert run_example("sampling.py", *arguments).stdout.splitlines() == lines


def test_sampling_says_which_string_ended_the_text(model_server: ServerProcess) -> None:
    arguments = ["--url", model_server.grpc_address, "--prompt", "One, two, three, four,", "--temperature", "0"]
    (line,) = run_example("sampling.py", *arguments, "--stop", ",", "--keep-stop").stdout.splitlines()
    assert line.endswith(",' [stop at ',']")


@pytest.mark.parametrize(
    ("name", "address", "arguments"),
    [
        ("grpc_stream.py", "grpc", ["--prompt", "Hi", "--temperature", "-1"]),
        ("http_generate.py", "http", ["--prompt", "Hi", "--temperature", "-1"]),
        ("http_generate.py", "http", ["--prompt", "Hi", "--temperature", "-1", "--stream"]),
        ("structured_output.py", "grpc", ["--chat", "Hi", "--temperature", "-1"]),
        ("logprobs.py", "http", ["--prompt", "Hi", "--temperature", "-1"]),
        ("sampling.py", "grpc", ["--prompt", "Hi", "--temperature", "-1"]),
    ],
)
def test_refused_request_shows_the_field(
    model_server: ServerProcess, name: str, address: str, arguments: list[str]
) -> None:
    url = getattr(model_server, f"{address}_address")
    assert "temperature: " in run_example(name, "--url", url, *arguments, exit_code=1).stderr


def readme_example(language: str, start: str) -> str:
    """The README's code block of a language that begins with ``start``."""
    blocks = (ROOT / "README.md").read_text().split("```")[1::2]
    (block,) = [block for block in blocks if block.startswith(f"{language}\n{start}")]
    return block.removeprefix(f"{language}\n")


def test_readme_python_example_prints_an_answer(model_server: ServerProcess) -> None:
    example = readme_example("python", "import queue").replace("localhost:8001", model_server.grpc_address)
    # The greedy twin of the shipped entry, with a short answer by default.
    example = example.replace('"smollm2"', '"brief"')
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=240, check=True)
    assert len(result.stdout) > 20


def test_readme_curl_example_prints_events(model_server: ServerProcess) -> None:
    example = readme_example("bash", "curl -N").replace("localhost:8000", model_server.http_address)
    result = subprocess.run(["bash", "-c", example], capture_output=True, text=True, timeout=240, check=True)
    shown = readme_example("", "data: ").splitlines()[0]
    assert result.stdout.splitlines()[0] == shown


def test_readme_structured_output_example_gives_json(model_server: ServerProcess) -> None:
    example = readme_example("bash", "curl localhost").replace("localhost:8000", model_server.http_address)
    result = subprocess.run(["bash", "-c", example], capture_output=True, text=True, timeout=240, check=True)
    assert set(json.loads(json.loads(result.stdout)["text_output"])) == {"city", "country"}
