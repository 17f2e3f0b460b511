"""Options of an engine and its front ends."""

import pytest

from mstar.runtime.options import ENGINE_OPTIONS, FRONT_OPTIONS, OPTIONS, EngineOptions, FrontOptions, parse_options
from mstar.runtime.params import PARAMETERS
from mstar.utils.errors import LoadError


@pytest.mark.parametrize(("struct", "table"), [(EngineOptions, ENGINE_OPTIONS), (FrontOptions, FRONT_OPTIONS)])
def test_the_structs_have_the_tables_rows_and_defaults(struct, table):
    assert struct.__struct_fields__ == tuple(field.name for field in table)
    options = struct(model="m") if struct is EngineOptions else struct()
    for field in table:
        if field.name != "model":
            assert getattr(options, field.name) == field.default


def test_every_option_has_a_sentence():
    assert all(field.doc.endswith(".") for field in OPTIONS)


def test_defaults_of_parameters_are_unset_so_that_the_models_own_count():
    options = FrontOptions()
    names = [name for name in FrontOptions.__struct_fields__ if name.startswith("default_")]
    assert len(names) == 6
    assert {getattr(options, name) for name in names} == {None}


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_a_default_takes_what_its_parameter_takes(name):
    option, parameter = (
        next(f for f in t if f.name == n) for t, n in ((OPTIONS, f"default_{name}"), (PARAMETERS, name))
    )
    bounds = ("kind", "low", "high", "above_low")
    assert [getattr(option, bound) for bound in bounds] == [getattr(parameter, bound) for bound in bounds]


def test_strings_become_values():
    engine, front = parse_options(
        {"model": "m", "kv_memory_bytes": "1.5 GiB", "capture_batch_sizes": "1,2, 4", "page_size": "32",
         "default_max_tokens": "512", "default_temperature": "0"}
    )  # fmt: skip
    assert (engine.kv_memory_bytes, engine.capture_batch_sizes, engine.page_size) == (3 * 2**29, (1, 2, 4), 32)
    assert (front.default_max_tokens, front.default_temperature) == (512, 0.0)


@pytest.mark.parametrize("unset", [None, "", "  ", "${MSTAR_DTYPE}"])
def test_unset_values_take_the_default(unset):
    engine, _ = parse_options({"model": "m", "dtype": unset})
    assert engine.dtype == "auto"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "option model is missing"),
        ({"model": "${MODEL}"}, "option model is missing"),
        ({"model": "m", "max_seqlen": "1"}, r"option max_seqlen is unknown \(did you mean max_seq_len\?\)"),
        ({"model": "m", "dtype": "fp32"}, "option dtype: one of auto, float32, bfloat16, float16, got 'fp32'"),
        ({"model": "m", "max_running_requests": "0"}, "option max_running_requests: an integer >= 1"),
        ({"model": "m", "default_top_p": "0"}, "option default_top_p: a finite number > 0 and <= 1"),
        ({"model": "m", "default_min_p": "1.5"}, "option default_min_p: a finite number >= 0 and <= 1"),
        ({"model": "m", "default_repetition_penalty": "0"}, "option default_repetition_penalty: a finite number > 0"),
        ({"model": "m", "max_n": "0"}, "option max_n: an integer >= 1"),
    ],
)
def test_what_cannot_be_used_is_a_load_error_that_names_it(mapping, message):
    with pytest.raises(LoadError, match=message):
        parse_options(mapping)


def test_the_key_tells_engines_apart_and_ignores_the_front_end():
    base, _ = parse_options({"model": "m"})
    same, _ = parse_options({"model": "m", "default_max_tokens": "9", "dtype": "auto"})
    other, _ = parse_options({"model": "m", "dtype": "float32"})
    assert base.key() == same.key() != other.key()
