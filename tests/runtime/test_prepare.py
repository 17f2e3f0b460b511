"""The checks and defaults of one request."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mstar.conductor.request import Guide, LogitEdits
from mstar.engine.resources.sampler.config import derive_seed
from mstar.runtime.options import FrontOptions
from mstar.runtime.params import SamplingParams
from mstar.runtime.prepare import PENALTY_RANGE, prepare_request, sequences_of
from mstar.utils.errors import InvalidArgument, Unsupported


class Letters:
    """A tokenizer of one token per character; a lone "~" has none, and "~~" is two of the highest ids there are."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [5000] * 2 if "~~" in text else [ord(c) for c in text if c != "~"]


@dataclass
class Front:
    """A front of one token per character, without a model."""

    name: str = "letters"
    vocab_size: int = 1000
    context_length: int = 64
    eos_ids: frozenset[int] = frozenset({2})
    tokenizer: Any = field(default_factory=Letters)
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
     (np.float32(1e-5).item(), None, {}, np.float32(1e-5).item()),
     (1e30, None, {}, 1e30), (None, None, {"temperature": 0.0}, 0.0), (0.5, None, {"temperature": 0.0}, 0.5)],
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


@pytest.mark.parametrize(
    ("name", "values", "off"),
    [("top_k", (3, 4, 5), 0), ("top_p", (0.3, 0.4, 0.5), 1.0), ("min_p", (0.3, 0.4, 0.5), 0.0),
     ("repetition_penalty", (1.3, 1.4, 1.5), 1.0)],
)  # fmt: skip
def test_a_filter_is_the_requests_then_the_options_then_the_checkpoints(name, values, off):
    asked, option, generation = values
    front, options = Front(generation={name: generation}), {f"default_{name}": option}
    assert getattr(prepare(front, {name: asked}, options, text="a"), name) == asked
    assert getattr(prepare(front, {}, options, text="a"), name) == option
    assert getattr(prepare(front, {}, {}, text="a"), name) == generation
    assert getattr(prepare(text="a"), name) == off
    assert getattr(prepare(front, {name: off}, options, text="a"), name) == off


@pytest.mark.parametrize(("penalty", "expected"), [(1e-30, PENALTY_RANGE[0]), (1e30, PENALTY_RANGE[1]), (1.1, 1.1)])
def test_a_penalty_survives_single_precision(penalty, expected):
    assert prepare(text="a", params={"repetition_penalty": penalty}).repetition_penalty == expected


@pytest.mark.parametrize(
    ("asked", "option", "generation", "expected"),
    [  # min_tokens and max_tokens of the request, default_max_tokens, the checkpoint's own; min and max of the result
        ((None, None), None, {}, (0, None)),
        ((None, None), None, {"min_tokens": 3, "max_tokens": 9}, (3, 9)),
        ((None, None), 7, {"min_tokens": 3, "max_tokens": 9}, (3, 7)),
        ((4, 5), 7, {"min_tokens": 3, "max_tokens": 9}, (4, 5)),
        ((None, 2), None, {"min_tokens": 3}, (2, 2)),
        ((None, 0), None, {"min_tokens": 3}, (0, 0)),
        ((None, None), 2, {"min_tokens": 3}, (2, 2)),
        ((12, None), None, {"max_tokens": 9}, (12, 12)),
        ((5, 5), None, {}, (5, 5)),
        ((60, 60), None, {}, (54, 54)),
        ((2**40, None), None, {}, (54, None)),
    ],
)
def test_the_budget_is_the_requests_and_no_default_of_the_model_is_in_its_way(asked, option, generation, expected):
    params = {"min_tokens": asked[0], "max_tokens": asked[1]}
    request = prepare(Front(generation=generation), params, {"default_max_tokens": option}, text="a" * 10)
    assert (request.min_tokens, request.max_tokens) == expected


@pytest.mark.parametrize(
    ("params", "options", "limit"),
    [({"min_tokens": 6, "max_tokens": 5}, {}, 5), ({"min_tokens": 600}, {"default_max_tokens": 512}, 512)],
)
def test_more_at_least_than_at_most_is_refused(params, options, limit):
    with pytest.raises(
        InvalidArgument, match=rf"^min_tokens: an integer >= 0 and <= {limit}, which is max_tokens, got 6"
    ):
        prepare(text="a", params=params, options=options)


def test_a_model_without_end_tokens_has_no_floor_of_its_own():
    front = Front(generation={"min_tokens": 3}, eos_ids=frozenset())
    assert prepare(front, text="a").min_tokens == 0
    assert prepare(front, {"stop_token_ids": [5]}, text="a").min_tokens == 3


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"temperature": 9e-6}, {"top_k": 1}])
def test_several_greedy_texts_are_refused(greedy):
    with pytest.raises(InvalidArgument, match=r"^n: 1 where temperature 0 or top_k 1 is greedy.*, got 2"):
        prepare(text="a", params={"n": 2, **greedy})
    prepare(text="a", params={"n": 1, **greedy})


def test_a_model_that_is_greedy_by_itself_gives_several_texts():
    prepare(Front(generation={"temperature": 0.0}), {"n": 2}, text="a")


def test_texts_are_bounded_by_the_option():
    prepare(text="a", params={"n": 16})
    with pytest.raises(InvalidArgument, match=r"^n: an integer >= 1 and <= 16, the option max_n, got 17"):
        prepare(text="a", params={"n": 17})
    with pytest.raises(InvalidArgument, match=r"^n: .* <= 2, the option max_n, got 3"):
        prepare(text="a", params={"n": 3}, options={"max_n": 2})


def test_every_text_has_a_seed_of_its_own_and_the_first_the_requests():
    request = prepare(text="a", params={"seed": 7, "prompt_logprobs": 0, "logprobs": 1})
    texts = sequences_of(request, 3)
    assert texts[0] is request
    assert [text.seed for text in texts] == [7, derive_seed(7, "n:1"), derive_seed(7, "n:2")]
    assert [text.num_prompt_logprobs for text in texts] == [0, -1, -1]
    assert {text.num_logprobs for text in texts} == {1}
    assert [text.seed for text in sequences_of(prepare(text="a"), 2)] == [None, None]


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [("stop_token_ids", [5, 1000], 1000), ("allowed_token_ids", [1000], 1000), ("logit_bias", {"1000": 5}, 1000)],
)
def test_ids_outside_the_vocabulary_are_refused(name, value, got):
    with pytest.raises(InvalidArgument, match=rf"^{name}: token ids in \[0, 1000\), got {got}$"):
        prepare(text="a", params={name: value, "min_tokens": 1})


def test_a_request_without_edits_or_guide_carries_none():
    request = prepare(text="a", params={"presence_penalty": 0, "logit_bias": {5: 0}, "bad_words": []})
    assert (request.edits, request.guide) == (None, None)


def test_edits_are_in_token_ids():
    params = {
        "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"5": 200, "6": 0}, "bad_words": ["ab"],
        "allowed_token_ids": [9, 3, 9],
    }  # fmt: skip
    assert prepare(text="a", params=params).edits == LogitEdits(
        presence_penalty=0.5,
        frequency_penalty=-1.0,
        bias=((5, 100.0),),
        bad_words=((97, 98), (32, 97, 98)),
        allowed_ids=np.array([3, 9], "<i4").tobytes(),
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], ((97,), (32, 97))),
        (["  a"], ((97,), (32, 97))),
        (["a", " a"], ((97,), (32, 97))),
        ([" "], ((32,), (32, 32))),
        (["\n"], ((10,), (32, 10))),
        (["~~"], ()),
    ],
)
def test_a_bad_word_is_barred_bare_and_behind_a_space(words, expected):
    edits = prepare(text="a", params={"bad_words": words}).edits
    assert (edits.bad_words if edits else ()) == expected


@pytest.mark.parametrize(("word", "message"), [("~", "words of at least one token"), ("a\ud800", "valid UTF-8")])
def test_a_bad_word_without_tokens_is_refused(word, message):
    with pytest.raises(InvalidArgument, match=f"^bad_words: {message}"):
        prepare(text="a", params={"bad_words": ["a", word]})


def test_a_stop_string_that_no_text_can_hold_is_refused():
    with pytest.raises(InvalidArgument, match=r"^stop: valid UTF-8"):
        prepare(text="a", params={"stop": ["a", "\ud800"]})


def test_a_guide_goes_to_the_engine_as_type_and_text():
    regex = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}
    assert prepare(text="a", params=regex).guide == Guide("regex", "a+")
    assert prepare(text="a", params={"guided_decoding_guide_type": "json"}).guide == Guide("json", "")


def test_logprobs_are_asked_for_or_not():
    request = prepare(text="a", params={"logprobs": 0, "prompt_logprobs": 20})
    assert (request.num_logprobs, request.num_prompt_logprobs) == (0, 20)
    request = prepare(text="a")
    assert (request.num_logprobs, request.num_prompt_logprobs) == (-1, -1)


def test_a_time_limit_counts_from_arrival():
    assert prepare(text="a", params={"timeout_ms": 3}, arrival_ns=1_000).deadline_ns == 3_001_000
    assert prepare(text="a", arrival_ns=1_000).deadline_ns == 0
    before = time.monotonic_ns()
    deadline = prepare(text="a", params={"timeout_ms": 1000}).deadline_ns
    assert before + 10**9 <= deadline <= time.monotonic_ns() + 10**9


def test_the_rest_goes_to_the_engine_as_it_is():
    values = {
        "repetition_window": 8, "penalize_prompt": False, "top_p_first": True, "top_p_min_keep": 3, "seed": 5,
        "ignore_eos": True, "request_priority": -3, "tenant": "t", "cache_salt": "s", "no_cache": True,
    }  # fmt: skip
    request = prepare(text="a", params=values | {"stop_token_ids": [4, 9]})
    assert {name: getattr(request, name) for name in values} == values
    assert request.stop_ids == (4, 9)


@pytest.mark.parametrize("name", ["tenant", "cache_salt"])
def test_a_name_that_no_key_can_be_made_of_is_refused(name):
    with pytest.raises(InvalidArgument, match=rf"^{name}: valid UTF-8"):
        prepare(text="a", params={name: "a\ud800"})


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
