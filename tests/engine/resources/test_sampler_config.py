"""Sampling declarations: fields and defaults, seeds, and what is refused with which words."""

import dataclasses
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mstar.engine.resources.sampler.config import (
    SamplerSpec,
    SamplerStep,
    SamplingReqConfig,
    derive_seed,
    narrow_to_final,
)

PLAIN = SamplerSpec("sampler", {"LLM"}, 100)
FULL = SamplerSpec("sampler", {"LLM"}, 100, True, True, 16, (1, 2), True)
BARE = SamplerSpec("sampler", {"LLM"}, 100, enable_repetion_penalty=False)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("seed", "stream", "derived"),
    [
        (0, "sampler", 1886083308747391342),
        (0, "main", 8244503107071817633),
        (42, "sampler", 4986890812388105367),
        (42, "talker_sampler", 5347737414191627967),
        (42, "", 743613425793147588),
        (-1, "a", 8914011674754805438),
        (2**63 - 1, "sampler", 6714142622267328678),
    ],
)
def test_derived_seeds(seed, stream, derived):
    assert derive_seed(seed, stream) == derived


def test_any_integer_is_a_seed():
    assert 0 <= derive_seed(10**40, "x") < 2**63


def fields_of(cls):
    return [
        (f.name, f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
        for f in dataclasses.fields(cls)
    ]


def test_fields_defaults_and_order():
    missing = dataclasses.MISSING
    assert fields_of(SamplerSpec) == [
        ("resource_key", missing),
        ("nodes", missing),
        ("vocab_size", missing),
        ("enable_repetion_penalty", True),
        ("enable_min_p", False),
        ("max_repetition_window", 0),
        ("min_tokens_stop_ids", ()),
        ("enable_top_p_first", False),
    ]
    assert fields_of(SamplingReqConfig) == [
        ("temperature", 0.6),
        ("top_k", 0),
        ("top_p", 1),
        ("ignore_eos", False),
        ("repetition_penalty", 1),
        ("min_p", 0.0),
        ("repetition_window", 0),
        ("min_tokens", 0),
        ("top_p_first", False),
        ("top_p_min_keep", 1),
        ("penalize_prompt", True),
        ("_seed", 0),
    ]
    assert fields_of(SamplerStep) == [
        ("segments", None),
        ("apply_penalty", True),
        ("apply_filters", True),
        ("prefill_tracked_tokens", {}),
        ("kept_rids", None),
    ]
    assert list(inspect.signature(SamplingReqConfig.apply_conductor_config).parameters) == [
        "self",
        "seed",
        "resource_key",
        "kwargs",
    ]


def test_the_step_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplerStep().apply_filters = False


def test_declaring_loads_no_kernels_and_no_torch():
    code = "import sys, mstar.engine.resources.sampler.config; print({'torch', 'mstar.kernels'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_the_conductor_sets_the_seed():
    config = SamplingReqConfig()
    config.apply_conductor_config(seed=7, anything="else")
    assert config.seed == 7
    config.apply_conductor_config(seed=42, resource_key="sampler")
    assert config.seed == derive_seed(42, "sampler")
    with pytest.raises(AttributeError):
        config.seed = 1


REFUSED = {
    "temperature": [-1, -1e-9, NAN, INF, -INF, True, "1", 10**400],
    "top_p": [0, -0.1, 1.0001, 2, NAN, INF, True, "0.5"],
    "min_p": [-0.1, 1.1, NAN, INF, False, "0"],
    "repetition_penalty": [0, -1, NAN, INF, True, "1"],
    "top_k": [-1, 5.0, True, "40", NAN],
    "ignore_eos": [0, 1, "true"],
    "penalize_prompt": [0, 1, NAN],
    "top_p_first": [0, 1, "x"],
    "repetition_window": [-1, True, 1.0, INF],
    "min_tokens": [-1, False, 2.0, NAN],
    "top_p_min_keep": [0, -1, True, 1.0],
}
ALLOWED = {
    "temperature": [0, -0.0, 0.0, 1, 1e-12, 5e-324, 1e30],
    "top_p": [1, 1.0, 1e-9, 0.5],
    "min_p": [0, 1, 0.5],
    "repetition_penalty": [1, 0.1, 2, 1e30],
    "top_k": [0, 1, 10**9, 2**63],
    "ignore_eos": [True, False],
    "penalize_prompt": [True, False],
    "top_p_first": [True, False],
    "repetition_window": [0, 16],
    "min_tokens": [0, 5],
    "top_p_min_keep": [1, 3],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED.items() for v in values])
def test_values_outside_the_contract_are_refused_by_field_and_value(field, value):
    with pytest.raises(ValueError, match=rf"^{field} must be ") as caught:
        SamplingReqConfig(**{field: value}).validate(FULL)
    assert ascii(value)[:50] in str(caught.value)


RANGES = {
    "temperature": "must be a finite number >= 0",
    "top_p": "must be a finite number in (0, 1]",
    "min_p": "must be a finite number in [0, 1]",
    "repetition_penalty": "must be > 0 and finite",
    "top_k": "must be an integer >= 0",
    "ignore_eos": "must be true or false",
    "penalize_prompt": "must be true or false",
    "top_p_first": "must be true or false",
    "repetition_window": "must be an integer >= 0",
    "min_tokens": "must be an integer >= 0",
    "top_p_min_keep": "must be an integer >= 1",
}


@pytest.mark.parametrize("field", RANGES)
def test_a_refusal_names_field_range_and_value(field):
    assert RANGES.keys() == {f.name for f in dataclasses.fields(SamplingReqConfig)} - {"_seed"}
    with pytest.raises(ValueError, match="must be") as caught:
        SamplingReqConfig(**{field: "x"}).validate()
    assert str(caught.value) == f"{field} {RANGES[field]}, got 'x'"


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in ALLOWED.items() for v in (*values, None)])
def test_values_inside_the_contract_and_none_pass(field, value):
    SamplingReqConfig(**{field: value}).validate()
    SamplingReqConfig(**{field: value}).validate(FULL)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SamplingReqConfig) if f.name != "_seed"])
def test_none_passes_every_spec(field):
    SamplingReqConfig(**{field: None}).validate(BARE)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SamplingReqConfig)])
def test_none_becomes_the_default_it_stands_for(field):
    given = SamplingReqConfig(temperature=0.0, top_k=3, top_p_first=True, _seed=9)
    wanted = dataclasses.replace(given, **{field: getattr(SamplingReqConfig(), field)})
    assert dataclasses.replace(given, **{field: None}).without_none() == wanted
    assert given.without_none() is given


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [("repetition_penalty", 0, "must be > 0"), ("min_tokens", -1, ">= 0"), ("top_p_min_keep", 0, ">= 1")],
)
def test_words_that_clients_match(field, value, text):
    with pytest.raises(ValueError, match=text):
        SamplingReqConfig(**{field: value}).validate()


@pytest.mark.parametrize(
    ("spec", "config", "text"),
    [
        (PLAIN, {"min_p": 0.1}, "min_p.*enable_min_p=False"),
        (BARE, {"repetition_penalty": 1.1}, "repetition_penalty.*enable_repetion_penalty=False"),
        (PLAIN, {"repetition_window": 4}, "max_repetition_window=0"),
        (FULL, {"repetition_window": 17}, "max_repetition_window=16"),
        (PLAIN, {"min_tokens": 1}, "no min_tokens_stop_ids"),
        (PLAIN, {"top_p_first": True}, "top_p_first.*enable_top_p_first=False"),
        (PLAIN, {"top_p_min_keep": 2}, "top_p_min_keep.*enable_top_p_first=False"),
        (BARE, {"repetition_penalty": 1.1, "repetition_window": 4}, "max_repetition_window=0"),
    ],
)
def test_what_the_spec_cannot_honour_is_refused(spec, config, text):
    with pytest.raises(ValueError, match=text):
        SamplingReqConfig(**config).validate(spec)
    SamplingReqConfig(**config).validate()


def test_a_windowed_penalty_needs_no_presence_penalty():
    spec = SamplerSpec("s", {"n"}, 10, enable_repetion_penalty=False, max_repetition_window=8)
    SamplingReqConfig(repetition_penalty=1.2, repetition_window=8).validate(spec)


@pytest.mark.parametrize(
    ("penalty", "min_tokens", "is_needed"),
    [(1, 0, False), (1.0, None, False), (None, 0, False), (1.1, 0, True), (0.9, None, True), (1, 1, True)],
)
def test_only_a_penalty_and_a_least_length_need_the_full_variant(penalty, min_tokens, is_needed):
    config = SamplingReqConfig(repetition_penalty=penalty, repetition_window=4, min_tokens=min_tokens, min_p=0.1)
    assert config.needs_full_variant == is_needed


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("vocab_size", 0, "vocab_size must be an integer >= 1, got 0"),
        ("max_repetition_window", -1, "max_repetition_window must be an integer >= 0 and <= 1048576, got -1"),
        ("max_repetition_window", 2**20 + 1, "<= 1048576, got 1048577"),
        ("max_repetition_window", True, "got True"),
        ("max_repetition_window", "8", "got '8'"),
        ("min_tokens_stop_ids", (1, 100), "min_tokens_stop_ids must be an integer >= 0 and <= 99, got 100"),
        ("min_tokens_stop_ids", (-1,), "got -1"),
    ],
)
def test_a_spec_outside_the_contract_is_refused(field, value, text):
    with pytest.raises(ValueError, match="must be an integer") as caught:
        dataclasses.replace(PLAIN, **{field: value})
    assert text in str(caught.value)


def test_operators_may_set_the_longest_window_alone():
    patched = FULL.apply_yaml_overrides(max_repetition_window=64)
    assert patched == dataclasses.replace(FULL, max_repetition_window=64)
    with pytest.raises(ValueError, match=r"max_repetition_window must be .* got -4"):
        FULL.apply_yaml_overrides(max_repetition_window=-4)
    with pytest.raises(TypeError, match="max_repetition_window only, got enable_min_p, vocab_size"):
        FULL.apply_yaml_overrides(vocab_size=5, enable_min_p=False, max_repetition_window=1)


@pytest.mark.parametrize(("scatter", "bound"), [("0", None), ("1", 12)])
def test_masters_that_cannot_grow_bound_the_requests(scatter, bound, monkeypatch):
    monkeypatch.setenv("MSTAR_SAMPLER_INGRAPH_SCATTER", scatter)
    monkeypatch.setenv("MSTAR_SAMPLER_SLOTS", "12")
    assert PLAIN.max_requests() == bound


@pytest.mark.parametrize(
    ("finals", "kept_before", "kept"),
    [
        ([True, True], None, None),
        ([True, True], frozenset({7}), frozenset({7})),
        ([True, False], None, frozenset({7})),
        ([False, False], None, frozenset()),
        ([True, False], frozenset({8}), frozenset()),
        ([None, False], None, frozenset({7})),
    ],
)
def test_only_final_chunks_keep_their_draw(finals, kept_before, kept):
    rows = [SimpleNamespace() if final is None else SimpleNamespace(is_final_chunk=final) for final in finals]
    step = SamplerStep(kept_rids=kept_before, apply_filters=False)
    narrowed = narrow_to_final(step, [7, 8], rows)
    assert narrowed.kept_rids == kept
    assert not narrowed.apply_filters
    assert (narrowed is step) == all(final is not False for final in finals)
