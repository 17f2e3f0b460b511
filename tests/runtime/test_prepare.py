"""The checks and defaults of one request."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mstar.runtime.options import FrontOptions
from mstar.runtime.params import SamplingParams
from mstar.runtime.prepare import prepare_request
from mstar.utils.errors import InvalidArgument, Unsupported


@dataclass
class Front:
    """A front of one token per character, without a model."""

    name: str = "letters"
    vocab_size: int = 1000
    context_length: int = 64
    generation: dict[str, Any] = field(default_factory=dict)
    chat: Any = "a template"

    def encode(self, text):
        return np.array([ord(c) % self.vocab_size for c in text], np.int32)

    def encode_chat(self, messages):
        return self.encode("".join(m["content"] for m in messages))


def prepare(front=None, params=None, options=None, **prompt):
    return prepare_request(
        front or Front(),
        params=SamplingParams(**(params or {})),
        front_options=FrontOptions(**(options or {})),
        **prompt,
    )


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "abc"},
        {"input_ids": [97, 98, 99]},
        {"input_ids": np.array([97, 98, 99], np.int64)},
        {"messages": [{"role": "user", "content": "abc"}]},
        {"messages": '[{"role": "user", "content": "abc"}]'},
    ],
)
def test_each_form_of_prompt_becomes_ids(prompt):
    assert prepare(**prompt).prompt_array().tolist() == [97, 98, 99]


@pytest.mark.parametrize("prompt", [{}, {"text": "a", "input_ids": [1]}, {"text": "a", "messages": []}])
def test_exactly_one_prompt(prompt):
    with pytest.raises(InvalidArgument, match="prompt: exactly one of text_input, input_ids, messages"):
        prepare(**prompt)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [({"text": ""}, "text_input"), ({"input_ids": []}, "input_ids"), ({"messages": []}, "messages"),
     ({"messages": "[]"}, "messages"), ({"messages": [{"role": "user", "content": ""}]}, "messages")],
)  # fmt: skip
def test_an_empty_prompt_is_refused(prompt, field):
    with pytest.raises(InvalidArgument, match="at least one") as caught:
        prepare(**prompt)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "ids", [[-1], [1000], [200_000], [1.5], [1.0], [2**40], [2**70], [True], [1, True], ["1"], "12", [[1, 2]],
            [[1], [2, 3]], 5, None.__class__, np.array([0.5]), np.array([[1]])]
)  # fmt: skip
def test_ids_must_be_integers_of_the_vocabulary(ids):
    with pytest.raises(InvalidArgument, match=r"input_ids: .*token ids in \[0, 1000\)"):
        prepare(input_ids=ids)


@pytest.mark.parametrize(("length", "is_fine"), [(62, True), (63, True), (64, False), (65, False)])
def test_a_prompt_must_leave_room_for_a_token(length, is_fine):
    if is_fine:
        assert prepare(text="a" * length, params={"max_tokens": 5}).max_tokens == min(5, 64 - length)
        return
    with pytest.raises(InvalidArgument, match=rf"text_input: at most 63 tokens.* limit of 64, got {length}"):
        prepare(text="a" * length)


def test_the_engines_lower_limit_counts():
    with pytest.raises(InvalidArgument, match="limit of 8, got 8"):
        prepare(text="a" * 8, context_length=8)


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [(None, None, None), (None, 7, 7), (None, 512, 54), (3, 7, 3), (0, 7, 0), (2**40, None, 54)],
)
def test_max_tokens_is_filled_in_and_cut(asked, default, expected):
    request = prepare(text="a" * 10, params={"max_tokens": asked}, options={"default_max_tokens": default})
    assert request.max_tokens == expected


@pytest.mark.parametrize(
    ("asked", "option", "generation", "expected"),
    [(None, None, {}, 0.6), (None, None, {"temperature": 0.2}, 0.2), (None, 0.4, {"temperature": 0.2}, 0.4),
     (0.9, 0.4, {"temperature": 0.2}, 0.9), (0, 0.4, {}, 0.0), (9e-6, None, {}, 0.0), (1e-5, None, {}, 1e-5),
     (None, None, {"temperature": float("nan")}, 0.6), (None, None, {"temperature": None}, 0.6),
     (1e30, None, {}, 1e30)],
)  # fmt: skip
def test_temperature_is_the_requests_then_the_options_then_the_checkpoints(asked, option, generation, expected):
    request = prepare(
        Front(generation=generation), text="a", params={"temperature": asked}, options={"default_temperature": option}
    )
    assert request.temperature == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(None, 0), (-1, 0), (0, 0), (1, 1), (999, 999), (1000, 0), (1001, 0), (2**31, 0), (2**63 - 1, 0)],
)
def test_top_k_is_off_from_the_vocabulary_up(asked, expected):
    assert prepare(text="a", params={"top_k": asked}).top_k == expected


def test_a_tiny_top_p_survives_single_precision():
    assert np.float32(prepare(text="a", params={"top_p": 1e-60}).top_p) > 0


def test_defaults_of_the_entry_are_used():
    request = prepare(text="a", options={"default_top_k": 5, "default_top_p": 0.5})
    assert (request.top_k, request.top_p) == (5, 0.5)


@pytest.mark.parametrize(
    "messages", ["{", "3", '{"role": "user"}', [3], ["a"], [{"content": "x"}], [{"role": 3}], "[" * 100_000, "nope"]
)
def test_a_chat_is_a_list_of_messages(messages):
    with pytest.raises(InvalidArgument, match="messages"):
        prepare(messages=messages)


@pytest.mark.parametrize("prompt", [{"text": "a\ud800"}, {"messages": '[{"role": "user", "content": "\\ud800"}]'}])
def test_half_a_character_is_refused(prompt):
    with pytest.raises(InvalidArgument, match="valid UTF-8"):
        prepare(**prompt)


def test_a_chat_needs_a_template():
    with pytest.raises(Unsupported, match="messages: a model with a chat template, got 'letters'"):
        prepare(Front(chat=None), messages=[{"role": "user", "content": "a"}])
