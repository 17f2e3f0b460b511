"""Settings by master row, gathered once while neither the batch nor any setting changes."""

from collections import Counter

import numpy as np
import pytest
import torch

from mstar.engine.resources.sampler.config import SamplingReqConfig
from mstar.engine.resources.sampler.settings import SETTINGS, StaticSettings
from mstar.engine.resources.step import BucketKey, SlotLease

CONFIGS = {
    0: SamplingReqConfig(temperature=0.0, top_k=7, top_p=0.25, min_p=0.5, top_p_first=True, top_p_min_keep=3, _seed=1),
    2: SamplingReqConfig(temperature=1.5, _seed=2**63 - 1),
}


def lease(slot):
    return SlotLease(slot, BucketKey("decode", 3, 3))


def rows(*values):
    return np.array(values, np.int64)


@pytest.fixture
def made():
    settings = StaticSettings(5, torch.device("cpu"), num_slots=2, counters=Counter())
    settings.reserve(4)
    for row, config in CONFIGS.items():
        settings.write(row, config)
    return settings


@pytest.mark.parametrize("slot", [None, 0, 1])
def test_a_step_gets_its_rows_settings_in_its_order(made, slot):
    columns = made.gather(rows(2, 0, 4), None if slot is None else lease(slot))
    assert {name: (column.dtype, column.shape) for name, column in columns.items()} == {
        name: (dtype, (3,)) for name, (_, dtype, _) in SETTINGS.items()
    }
    for name, (_, _, idle) in SETTINGS.items():
        given = [getattr(CONFIGS[row], name) for row in (2, 0)]
        assert columns[name].tolist() == pytest.approx([*given, idle])


def test_a_slots_columns_keep_their_addresses_and_slots_share_none(made):
    pointers = [
        {name: column.data_ptr() for name, column in made.gather(batch, lease(slot)).items()}
        for slot, batch in [(0, rows(2, 0, 4)), (1, rows(2, 0, 4)), (0, rows(1)), (0, rows(0, 1, 2, 3))]
    ]
    assert pointers[0] == pointers[2] == pointers[3]
    assert not set(pointers[0].values()) & set(pointers[1].values())


def test_an_eager_step_leaves_the_settings_of_the_one_before_alone(made):
    first = made.gather(rows(0), None)["top_k"]
    made.gather(rows(2), None)
    assert first.tolist() == [7]


def test_settings_are_gathered_once_per_slot_while_nothing_changes(made):
    counters = made._counters
    for slot in (None, 0, 1):
        for _ in range(3):
            made.gather(rows(2, 0), None if slot is None else lease(slot))
    assert counters == {"static_gathers": 3, "static_gather_hits": 6}
    made.gather(rows(0, 2), lease(0))
    assert counters["static_gathers"] == 4
    made.write(3, SamplingReqConfig())
    made.gather(rows(0, 2), lease(0))
    made.gather(rows(0, 2), lease(0))
    assert counters == {"static_gathers": 5, "static_gather_hits": 7}


def test_what_was_staged_ahead_is_what_is_gathered(made):
    made.stage(rows(0), lease(0))
    made.stage(rows(2), lease(1))
    assert made.gather(rows(0), lease(0))["temperature"].tolist() == [0.0]
    assert made.gather(rows(2), lease(1))["temperature"].tolist() == [1.5]
    assert made._counters == {"static_gathers": 2, "static_gather_hits": 2}


def test_a_row_in_nobodys_use_is_idle(made):
    made.clear(0)
    made.write(1, SamplingReqConfig())
    columns = made.gather(rows(0), lease(0))
    assert {name: column.item() for name, column in columns.items()} == {
        n: idle for n, (_, _, idle) in SETTINGS.items()
    }


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("seed", 2**63, -(2**63)),
        ("seed", -(10**30), (-(10**30) + 2**63) % 2**64 - 2**63),
        ("top_k", 2**80, 2**62),
        ("top_p_min_keep", 2**80, 2**62),
        ("temperature", 1e300, float(np.finfo(np.float32).max)),
    ],
)
def test_numbers_past_a_masters_range_are_brought_into_it(made, name, value, stored):
    made.write(1, SamplingReqConfig(**{"_seed" if name == "seed" else name: value}))
    assert made.gather(rows(1), None)[name].item() == stored
