"""Positions continue where a row stands, and are refused where the rotation is malformed."""

import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.positions.config import PositionConfig, PositionSpec, PositionStep
from mstar.engine.resources.step import SubmoduleStep

from .drive import CAPACITY, Rig


def positions_of(rig, ctx):
    return rig.rope.positions.tolist()


def test_positions_continue_per_request_in_batch_order():
    rig = Rig()
    for rid in (1, 2):
        rig.join(rid, rid)
    assert rig.run([1], [3], positions_of) == [0, 1, 2]
    assert rig.run([2, 1], [2, 1], positions_of) == [0, 1, 3]
    assert rig.run([1, 2], [1, 1], positions_of) == [4, 2]


def test_padding_rows_stay_at_zero():
    rig = Rig()
    rig.reserve(4, 4)
    rig.join(1, 0)
    for expected in ([0, 0, 0], [1, 0, 0], [2, 0, 0]):
        assert rig.run([1], [1, 1, 1], positions_of, padding=2, slot=0) == expected
    assert not rig.rope.next_position[CAPACITY:].any()


def test_advance_overrides_how_far_a_row_moves():
    rig = Rig()
    for rid in (1, 2):
        rig.join(rid, rid)
    parts = rig.step("kv_cache", "attn").steps
    step = SubmoduleStep(dict(parts) | {"rope": PositionStep(advance=(2, 7))})
    assert rig.run([1, 2], [3, 1], positions_of, step=step) == [0, 1, 2, 0]
    assert rig.run([1, 2], [1, 1], positions_of) == [2, 7]


def test_a_row_starts_at_zero_for_its_next_owner_only():
    rig = Rig()
    rig.join(1, 0)
    rig.run([1], [3])
    rig.join(1, 0)
    assert rig.run([1], [1], positions_of) == [3]
    rig.leave(1)
    rig.join(2, 0)
    assert rig.run([2], [1], positions_of) == [0]


def test_leased_positions_and_tables_lie_at_their_slots_address():
    rig = Rig()
    rig.reserve(4, 16)
    rig.join(1, 0)

    def addresses(rig, ctx):
        return rig.rope.positions.data_ptr(), rig.rope._cos.data_ptr(), rig.rope._sin.data_ptr()

    first, other, again = (rig.run([1], [1], addresses, slot=slot) for slot in (0, 1, 0))
    assert first == again
    assert not set(first) & set(other)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PositionConfig(rotary_dim=15), "rotary_dim must be even"),
        (PositionConfig(rotary_dim=32), r"2\.\.16, got 32"),
        (PositionConfig(rope_scaling={"type": "yarn", "factor": 2.0}), "yarn"),
        (PositionConfig(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
    ],
)
def test_what_cannot_be_rotated_is_refused_at_load(config, message):
    kv = Rig().kv
    cpu = torch.device("cpu")
    info = EngineResourceInfo(cpu, torch.float32, torch.float32, 8, 8, dependencies={"kv_cache": kv})
    spec = PositionSpec("rope", {"LLM"}, config)
    with pytest.raises(ValueError, match=message):
        spec.resource_class.build(spec, info)


def test_queries_and_keys_side_by_side_rotate_as_apart():
    rig = Rig()
    rig.join(1, 0)
    q, k = torch.randn(5, 6, 16), torch.randn(5, 2, 16)

    def both(rig, ctx):
        return torch.cat(rig.rope.rotate(q, k), 1), rig.rope.rotate_heads(torch.cat((q, k), 1))

    apart, together = rig.run([1], [5], both)
    assert torch.equal(apart, together)
    assert torch.equal(apart[0], torch.cat((q, k), 1)[0]), "position 0 is not turned"
