"""Requests from options and JSON lines."""

from __future__ import annotations

import pytest

from mstar.cli.errors import InputError
from mstar.cli.requests import Request, parse_ids, read_requests, request_of
from mstar.utils.errors import InvalidArgument

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "Hi"},
        {"text_input": "Hi", "messages": None, "top_k": "4"},
        {"prompt_ids": [1, 2], "stop": "x", "stream": True},
        {"messages": CHAT, "sampling_parameters": {"seed": 3}},
    ],
)
def test_a_request_is_one_prompt_and_parameters(options):
    assert request_of(options) == Request(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "prompt: exactly one of"),
        ({"prompt": "a", "prompt_ids": [1]}, "prompt: exactly one of"),
        ({"prompt": "a", "top_q": 1}, "top_q: a known parameter"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens: "),
        ({"prompt": "a", "temperature": float("nan")}, "temperature: "),
        ({"prompt": "a", "exclude_input_in_output": False}, "exclude_input_in_output: "),
    ],
)
def test_a_wrong_request_is_refused_by_field(options, message):
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        request_of(options)


def test_a_key_given_twice_in_a_line_is_refused(tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "a", "top_k": 1, "top_k": 2}\n')
    with pytest.raises(InputError, match="line 2: not JSON: each key once, not twice 'top_k'"):
        read_requests(file)


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", "[1, 2,3]", " [1 2 3]"])
def test_ids_are_parted_by_commas_or_spaces(text):
    assert parse_ids(text) == [1, 2, 3]


@pytest.mark.parametrize("text", ["a", "1.5", "1,,x"])
def test_other_text_is_no_list_of_ids(text):
    with pytest.raises(InvalidArgument, match=r"^prompt_ids: token ids"):
        parse_ids(text)


def test_every_line_of_a_file_is_one_request(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 1}\n\n{"prompt_ids": [5], "temperature": "0.5"}\n')
    assert read_requests(file) == [
        Request({"prompt": "a", "max_tokens": 1}, f"{file}, line 1"),
        Request({"prompt_ids": [5], "temperature": "0.5"}, f"{file}, line 3"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt":', "line 2: not JSON"),
        (b'{"prompt": "a"}\n\n[1]', "line 3: request: a JSON object"),
        (b'{"prompt": "a", "top_p": 0}', "line 1: top_p: "),
        (b"\n", "holds no request"),
        (b"\xff", "cannot be read"),
        (b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, content, message):
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_requests(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.jsonl: cannot be read"):
        read_requests(tmp_path / "gone.jsonl")
