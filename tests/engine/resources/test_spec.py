"""Declarations of resources: data alone."""

import subprocess
import sys

import pytest

from mstar.engine.resources.attention.config import AttentionSpec
from mstar.engine.resources.kv.config import PagedKVConfig, PagedKVSpec
from mstar.engine.resources.positions.config import PositionSpec
from mstar.engine.resources.sampler.config import SamplerSpec
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig, apply_overrides

KV = PagedKVConfig(num_layers=1, num_kv_heads=1, head_dim=8, max_seq_len=16)


def test_nodes_become_a_set():
    assert NodeResourceSpec("kv", ["LLM", "Talker", "LLM"]).nodes == {"LLM", "Talker"}


def test_a_spec_depends_on_nothing_and_bounds_nothing_unless_it_says_so():
    spec = NodeResourceSpec("kv", {"LLM"})
    assert spec.depends_on() == ()
    assert spec.max_requests() is None
    with pytest.raises(TypeError, match="names no resource_class"):
        _ = spec.resource_class


def test_a_resource_that_takes_no_overrides_names_itself_and_them():
    spec = NodeResourceSpec("other", {"LLM"})
    with pytest.raises(TypeError, match=r"'other' takes no overrides, got .'a', 'b'."):
        spec.apply_yaml_overrides(b=1, a=2)


@pytest.mark.parametrize(
    ("spec", "override", "bad"),
    [
        (PagedKVSpec("kv", {"LLM"}, KV), {"page_size": 4}, {"page_size": 0}),
        (AttentionSpec("attn", {"LLM"}), {"sliding_window": 4}, {"sliding_window": 0}),
        (PositionSpec("rope", {"LLM"}), {"rope_theta": 5.0}, {"rope_theta": -1}),
    ],
    ids=lambda value: getattr(value, "resource_key", None),
)
def test_an_override_makes_another_spec_and_is_checked_as_the_declaration_was(spec, override, bad):
    ((name, value),) = override.items()
    patched = spec.apply_yaml_overrides(**override)
    assert getattr(patched.config, name) == value
    assert getattr(spec.config, name) != value
    assert (patched.resource_key, patched.nodes) == (spec.resource_key, spec.nodes)
    with pytest.raises(ValueError, match=name):
        spec.apply_yaml_overrides(**bad)
    with pytest.raises(TypeError):
        spec.apply_yaml_overrides(no_such_setting=1)


def test_attention_and_positions_follow_their_cache():
    assert AttentionSpec("attn", {"LLM"}).depends_on() == ("kv_cache",)
    assert PositionSpec("rope", {"LLM"}).depends_on() == ("kv_cache",)
    assert PagedKVSpec("kv", {"LLM"}, KV).depends_on() == SamplerSpec("s", {"LLM"}, 10).depends_on() == ()


def test_parameters_of_a_request_ignore_what_the_conductor_tells_others():
    assert ResourceReqConfig().apply_conductor_config(seed=3, resource_key="sampler", anything=None) is None


@pytest.mark.parametrize(
    "module",
    ["spec", "step", "base", "kv.config", "attention.config", "positions.config", "sampler.config"],
)
def test_declaring_loads_no_kernels_and_no_torch(module):
    code = (
        f"import sys, mstar.engine.resources.{module}\n"
        "heavy = ('torch', 'flashinfer', 'triton', 'llvmlite', 'mstar.kernels')\n"
        "print([m for m in sys.modules if m.startswith(heavy)])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_overrides_patch_the_named_specs_and_leave_the_others():
    specs = [PagedKVSpec("kv", {"LLM"}, KV), PositionSpec("rope", {"LLM"})]
    kv, rope = apply_overrides(specs, {"kv": {"admission_fit": "peak"}})
    assert kv.config.admission_fit == "peak"
    assert kv.nodes == {"LLM"}
    assert rope is specs[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cache": {}}, "unknown resource 'cache'; this model has kv, rope"),
        ({"kv": {"admision_fit": "peak"}}, "'kv'.*admision_fit"),
        ({"kv": {"page_size": 0}}, "'kv': page_size"),
    ],
)
def test_overrides_that_fit_nothing_are_refused_by_name(overrides, message):
    with pytest.raises(ValueError, match=message):
        apply_overrides([PagedKVSpec("kv", {"LLM"}, KV), PositionSpec("rope", {"LLM"})], overrides)
