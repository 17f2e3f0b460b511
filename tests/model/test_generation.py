"""A model's own defaults: what is read, and what is passed over because it makes no sense."""

from __future__ import annotations

import pytest

from mstar.model.generation import generation_of_gguf, generation_of_hf


def test_defaults_go_by_the_parameters_names():
    raw = {
        "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 64,
        "min_new_tokens": 2, "do_sample": True, "eos_token_id": [1], "transformers_version": "4.51",
    }  # fmt: skip
    assert generation_of_hf(raw, "g") == {
        "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1, "max_tokens": 64,
        "min_tokens": 2,
    }  # fmt: skip


def test_absent_and_null_are_no_defaults(caplog):
    assert generation_of_hf({"temperature": None, "do_sample": None}, "g") == {}
    assert not caplog.records


@pytest.mark.parametrize(("raw", "temperature"), [({"do_sample": False}, 0.0), ({}, 0.7), ({"do_sample": True}, 0.7)])
def test_greedy_is_written_out(raw, temperature):
    assert generation_of_hf({"temperature": 0.7, **raw}, "g")["temperature"] == temperature


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "warm"),
     ("temperature", True), ("top_k", 1.5), ("top_k", -2), ("top_k", 10**30), ("top_p", 0), ("top_p", 1.1),
     ("min_p", -0.1), ("repetition_penalty", 0), ("repetition_penalty", [1]), ("max_new_tokens", -5),
     ("max_new_tokens", float("inf")), ("min_new_tokens", {}), ("do_sample", "no")],
)  # fmt: skip
def test_a_value_without_sense_is_passed_over_with_a_warning_that_names_it(caplog, key, value):
    assert generation_of_hf({"top_p": 0.9, key: value}, "/m/generation_config.json").get(key) is None
    (record,) = caplog.records
    assert f"/m/generation_config.json: {key}: " in record.getMessage()


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [("num_beams", 4, 1), ("no_repeat_ngram_size", 3, 0), ("suppress_tokens", [1], []), ("stop_strings", ["a"], None),
     ("forced_eos_token_id", 2, None), ("typical_p", 0.9, 1.0)],
)  # fmt: skip
def test_what_cannot_be_honoured_is_warned_of_unless_it_changes_nothing(caplog, key, value, neutral):
    assert generation_of_hf({key: neutral, "use_cache": True}, "g") == {}
    assert not caplog.records
    assert generation_of_hf({key: value}, "g") == {}
    assert f"g: {key}: {value!r} is not honoured" in caplog.text


def test_a_gguf_has_them_under_its_own_keys(caplog):
    meta = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.min_p": 2.0}
    assert generation_of_gguf(meta, "m.gguf") == {"temperature": 0.5, "top_k": 7}
    assert "m.gguf: general.sampling.min_p: 2.0" in caplog.text
