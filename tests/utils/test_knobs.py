"""Environment variables: defaults, values, and refusal by name."""

import inspect
import re
from pathlib import Path

import pytest

from mstar.utils import knobs

FUNCTIONS = {
    "MSTAR_DEVICE_LOOPBACK": (knobs.device_loopback_enabled, True),
    "MSTAR_INGRAPH_DECODE_ROPE": (knobs.ingraph_decode_rope, False),
    "MSTAR_INGRAPH_DECODE_TOKENS": (knobs.ingraph_decode_tokens, False),
    "MSTAR_KV_ADMISSION_FIT": (knobs.kv_admission_fit, None),
    "MSTAR_KV_ADMISSION_ORDER": (knobs.kv_admission_order, None),
    "MSTAR_KV_BACKFILL_WINDOW": (knobs.kv_backfill_window, None),
    "MSTAR_KV_CHAIN_LAZY_STEPS": (knobs.kv_chain_lazy_steps, 16),
    "MSTAR_KV_INGRAPH_LENGTHS": (knobs.kv_ingraph_lengths, True),
    "MSTAR_KV_PINNED_INDPTRS": (knobs.kv_pinned_indptrs, False),
    "MSTAR_KV_PLAN_CACHE": (knobs.kv_plan_cache, 0),
    "MSTAR_SAMPLER_INGRAPH_SCATTER": (knobs.sampler_ingraph_scatter, False),
    "MSTAR_SAMPLER_SLOTS": (knobs.sampler_slots, 4096),
    "MSTAR_WORKSPACE_BUFFER_MB": (knobs.workspace_buffer_mb, None),
    "MSTAR_GRAPH_COMPILE_MODE": (knobs.graph_compile_mode, None),
    "MSTAR_GRAPH_STRICT": (knobs.graph_strict, False),
    "MSTAR_PRE_PLAN_SPEC": (knobs.pre_plan_spec, False),
    "MSTAR_REQUIRE_ACCELERATOR_GRAPHS": (knobs.require_accelerator_graphs, False),
    "MSTAR_NUM_SLOTS": (knobs.num_slots, 2),
    "MSTAR_KV_DEBUG_ASSERTS": (knobs.kv_debug_asserts, False),
    "MSTAR_PROGRESS_ASSERTS": (knobs.progress_asserts, False),
    "MSTAR_PYTHON": (knobs.engine_python, None),
    "MSTAR_RUNTIME_DIR": (knobs.runtime_dir, None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("text", [None, ""])
def test_unset_or_empty_is_the_default(monkeypatch, name, text):
    monkeypatch.delenv(name, raising=False)
    if text is not None:
        monkeypatch.setenv(name, text)
    function, default = FUNCTIONS[name]
    assert function() == default
    assert type(function()) is type(default)


@pytest.mark.parametrize("name", [k for k, v in knobs.KNOBS.items() if v.kind == "bool"])
def test_booleans(monkeypatch, name):
    function = FUNCTIONS[name][0]
    for text, value in (("1", True), ("0", False)):
        monkeypatch.setenv(name, text)
        assert function() is value
    for text in ("true", "yes", "2", " 1", "-1"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=f"{name}='{text}'"):
            function()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("MSTAR_KV_CHAIN_LAZY_STEPS", {"1": 1, "7": 7}, ["0", "-1", "x", "1.5", "²"]),
        ("MSTAR_SAMPLER_SLOTS", {"1": 1, "8192": 8192}, ["0", "-3", "1e3"]),
        ("MSTAR_KV_PLAN_CACHE", {"0": 0, "1": 1, "2": 2}, ["3", "-1", "on"]),
        ("MSTAR_NUM_SLOTS", {"1": 1, "3": 3}, ["0", "two"]),
        ("MSTAR_KV_BACKFILL_WINDOW", {"1": 1, "64": 64}, ["0", "-1", "all"]),
        ("MSTAR_WORKSPACE_BUFFER_MB", {"1": 1, "128": 128}, ["0", "-1", "16385", "1.5"]),
    ],
)
def test_integers(monkeypatch, name, good, bad):
    function = FUNCTIONS[name][0]
    for text, value in good.items():
        monkeypatch.setenv(name, text)
        assert function() == value
    for text in bad:
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=f"^{name}="):
            function()


@pytest.mark.parametrize("name", [k for k, v in knobs.KNOBS.items() if v.choices])
def test_choices(monkeypatch, name):
    function = FUNCTIONS[name][0]
    for text in knobs.KNOBS[name].choices:
        monkeypatch.setenv(name, text)
        assert function() == text
    for text in ("all", "SUM", "1"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=f"{name}='{text}': must be one of"):
            function()


def test_the_environment_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("MSTAR_SAMPLER_SLOTS", "5")
    assert knobs.sampler_slots() == 5
    monkeypatch.setenv("MSTAR_SAMPLER_SLOTS", "6")
    assert knobs.sampler_slots() == 6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_reads_a_declared_knob(name):
    assert knobs.KNOBS[name].doc


def test_every_declared_knob_has_its_function():
    assert FUNCTIONS.keys() == knobs.KNOBS.keys()


@pytest.mark.parametrize(
    ("name", "returned"),
    [
        ("device_loopback_enabled", "bool"),
        ("ingraph_decode_rope", "bool"),
        ("kv_chain_lazy_steps", "int"),
        ("kv_pinned_indptrs", "bool"),
        ("kv_plan_cache", "int"),
        ("sampler_ingraph_scatter", "bool"),
        ("sampler_slots", "int"),
    ],
)
def test_published_functions_take_nothing_and_return_a_plain_value(name, returned):
    signature = inspect.signature(getattr(knobs, name), eval_str=True)
    assert not signature.parameters
    assert signature.return_annotation.__name__ == returned


def test_no_other_module_reads_a_variable_of_the_project():
    """Every one is in the table, so that documentation and refusals cover it."""
    root = Path(knobs.__file__).parents[1]
    named = {
        (path.relative_to(root).as_posix(), variable)
        for path in root.rglob("*.py")
        for variable in re.findall(r"MSTAR_[A-Z_]+", path.read_text())
    }
    assert {variable for _, variable in named} <= knobs.KNOBS.keys()
    read = re.compile(r"""(environ|getenv)\W*(get\W*)?["']MSTAR_""")
    assert [path.name for path in root.rglob("*.py") if read.search(path.read_text())] == ["knobs.py"]


def test_all_are_checked_at_once_also_those_that_nothing_reads(monkeypatch):
    knobs.check_all()
    monkeypatch.setenv("MSTAR_SAMPLER_SLOTS", "yes")
    with pytest.raises(ValueError, match="MSTAR_SAMPLER_SLOTS='yes'"):
        knobs.check_all()


@pytest.mark.parametrize("text", ["9" * 5000, "-" + "9" * 5000, str(2**63)])
@pytest.mark.parametrize("name", [knob.name for knob in knobs.KNOBS.values() if knob.kind == "int"])
def test_a_huge_number_is_refused_by_name(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"^{name}=.*must be"):
        knobs.read_int(name)
