"""``mstar generate`` with the real model: reference tokens, streaming, batches from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mstar.cli.main import app

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "smollm2_135m_greedy.json"
GREEDY = ["--temperature", "0"]


@pytest.fixture(scope="module")
def golden():
    return {case["name"]: case for case in json.loads(GOLDEN.read_text())["cases"]}


def run(*arguments):
    result = CliRunner().invoke(app, ["generate", "--model", "smollm2-135m", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def agrees(ids, case):
    """Equal to the reference up to the first step where two tokens tie."""
    count = min([len(ids), *case["tie_steps"]])
    return ids[:count] == case["output_ids"][:count]


@pytest.mark.timeout(900)
def test_a_file_of_all_reference_prompts_is_one_batch(tmp_path, golden):
    lines = []
    for case in golden.values():
        prompt = {"messages": case["messages"]} if case["kind"] == "chat" else {"prompt": case["prompt"]}
        lines.append(json.dumps({**prompt, "max_tokens": 48, "ignore_eos": True, "skip_special_tokens": False}))
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(lines))
    results = [json.loads(line) for line in run("--input", file, "--json", *GREEDY).splitlines()]
    assert len(results) == len(golden)
    for case, result in zip(golden.values(), results, strict=True):
        assert set(result) == {"output_ids", "text", "finish_reason", "num_input_tokens"}
        assert agrees(result["output_ids"], case), case["name"]
        assert result["num_input_tokens"] == len(case["prompt_ids"])
        assert result["finish_reason"] == "length"
        if not case["tie_steps"]:
            assert result["text"] == case["output_text"], case["name"]


def test_a_single_prompt_streams_the_same_text(golden):
    case = golden["en_capital"]
    options = ["--prompt-ids", ",".join(map(str, case["prompt_ids"])), "--max-tokens", 48, "--ignore-eos", *GREEDY]
    (result,) = [json.loads(line) for line in run(*options, "--json").splitlines()]
    assert result["output_ids"] == case["output_ids"]
    assert run(*options) == result["text"] + "\n"


def test_a_chat_gets_the_templates_prompt_and_ends_at_its_end_token(golden):
    case = golden["chat_hello"]
    result = json.loads(run("--messages", json.dumps(case["messages"]), "--max-tokens", 48, "--json", *GREEDY))
    assert result["num_input_tokens"] == len(case["prompt_ids"])
    assert result["output_ids"] == case["output_ids"][: case["eos_at"]]
    assert result["finish_reason"] == "stop"


def test_a_stop_string_ends_the_text(golden):
    case = golden["en_capital"]
    out = run("--prompt", case["prompt"], "--stop", "\n", "--max-tokens", 16, "--json", *GREEDY)
    result = json.loads(out)
    assert (result["text"], result["finish_reason"]) == (" Paris.", "stop")
    assert result["output_ids"] == case["output_ids"][:3]


def test_a_bad_prompt_in_a_file_is_named_by_its_line(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt_ids": [49152]}\n')
    result = CliRunner().invoke(app, ["generate", "--input", str(file)])
    assert result.exit_code == 2
    assert f"{file}, line 2: input_ids: " in result.stderr


def test_any_parameter_can_be_given_by_name(golden, tmp_path):
    case = golden["en_capital"]
    options = ["--prompt", case["prompt"], "--max-tokens", 3, "--param", "n=2", "--param", "temperature=0.9"]
    first, second = [json.loads(line) for line in run(*options, "--seed", 4, "--json").splitlines()]
    assert set(second) - set(first) == {"index"}
    assert second["index"] == 1
    assert run(*options, "--seed", 4) == f"{first['text']}\n{second['text']}\n"
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"prompt": case["prompt"], "n": 2, "temperature": 0.9}))
    assert run("--input", file, "--max-tokens", 3, "--seed", 4) == f"{first['text']}\n{second['text']}\n"


def test_logprobs_are_printed_by_token_id(golden):
    case = golden["en_capital"]
    options = ["--prompt", case["prompt"], "--max-tokens", 1, "--param", "logprobs=1", "--param", "prompt_logprobs=0"]
    result = json.loads(run(*options, "--json", *GREEDY))
    (position,) = result["logprobs"]
    assert list(position) == [str(case["output_ids"][0])]
    assert set(position[str(case["output_ids"][0])]) == {"logprob", "rank", "decoded_token"}
    assert result["prompt_logprobs"][0] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--param", "top_q=1"], "top_q: a known parameter"),
        (["--param", "min_p"], "--param: NAME=VALUE is needed"),
        (["--param", "top_k=3", "--top-k", "3"], "top_k: given once, not also by --param"),
        (["--param", "min_p=2"], "min_p: a finite number >= 0 and <= 1, got '2'"),
        (["--param", "guided_json={"], "guided_json: a JSON schema"),
    ],
)
def test_a_wrong_parameter_is_refused_before_the_model_loads(options, message):
    result = CliRunner().invoke(app, ["generate", "--model", "/no/where", "--prompt", "a", *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_parameter_that_the_prompt_cannot_have_is_named_by_its_line(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "a", "min_tokens": 9}\n')
    result = CliRunner().invoke(app, ["generate", "--input", str(file), "--max-tokens", "5"])
    assert result.exit_code == 2
    assert f"{file}, line 2: min_tokens: " in result.stderr
