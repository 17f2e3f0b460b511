"""The protocol of a resource: what one that only builds itself answers."""

import numpy as np
import pytest
import torch

from mstar.engine.resources.attention.manager import AttentionManager
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.positions.manager import PositionManager
from mstar.engine.resources.sampler.manager import SamplerManager
from mstar.engine.resources.step import ADMITTED, ResourceStep, StepContext


class Bare(Resource):
    @classmethod
    def build(cls, spec, info):
        return cls()


CTX = StepContext("decode", (0,), np.array([0]), np.array([1]))
NOTHING_TO_DO = [
    ("ingest_request", (0, 0, None), None),
    ("remove_request", (0, 0), None),
    ("admit", (ResourceStep(), CTX), ADMITTED),
    ("admit_retrieve", (0, "LLM", "decode", None), ADMITTED),
    ("plan", (ResourceStep(), CTX), None),
    ("commit", (ResourceStep(), CTX), None),
    ("abandon", (ResourceStep(), CTX), None),
    ("publish", (0,), None),
    ("reset_rows", ((0,), (0,)), None),
    ("clear_preplan", (), None),
    ("is_offloaded", (0,), False),
    ("offload", (0,), False),
    ("can_reload", (0,), False),
    ("reload", (0,), False),
    ("reclaimable", (0,), 0),
    ("get_offload_priority", (0,), 0.0),
    ("enable_prefix_cache", (0,), False),
    ("resolve_cached_prefix", (0,), 0),
    ("apply_cached_prefix", (0, 0, 16), None),
    ("extend_prefix_chains", (np.array([0]), np.array([1])), None),
    ("build_accelerator_graph_buffers", ([], 8, 64), None),
    ("post_warmup_validate", (), None),
    ("cleanup", (), None),
]


def test_only_building_is_asked_of_every_resource():
    assert Resource.__abstractmethods__ == {"build"}


@pytest.mark.parametrize(("hook", "arguments", "answer"), NOTHING_TO_DO, ids=[hook for hook, _, _ in NOTHING_TO_DO])
def test_a_resource_without_a_hook_has_nothing_to_do_in_it(hook, arguments, answer):
    assert getattr(Bare(), hook)(*arguments) == answer


def test_capabilities_are_off_unless_declared():
    bare = Bare()
    capabilities = ("force_double_buffer", "has_slot_masters", "supports_preplan", "supports_eviction")
    assert [getattr(bare, name) for name in capabilities] == [False] * 4
    assert bare.prefix_skip_safe, "a resource without state of past tokens loses nothing by a skipped prefix"
    with pytest.raises(NotImplementedError, match="Bare plans nothing ahead"):
        bare.promote_preplan(ResourceStep(), CTX)


@pytest.mark.parametrize("manager", [PagedKVManager, AttentionManager, PositionManager, SamplerManager])
def test_every_resource_of_a_text_model_plans_ahead(manager):
    assert manager.supports_preplan


def test_what_is_known_at_build():
    info = EngineResourceInfo(
        torch.device("cpu"), torch.float32, torch.float32, capacity=5, padding_rows=3, dependencies={"kv": Bare()}
    )
    assert info.total_rows == 8
    assert isinstance(info.dependency("kv"), Bare)
    with pytest.raises(KeyError):
        info.dependency("attn")
