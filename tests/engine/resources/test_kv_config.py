"""The paged cache's declaration: defaults, refusals by name, shards, and the environment's last word."""

import pytest

from mstar.engine.resources.kv.config import PagedKVConfig

SHAPE = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "max_seq_len": 16}


def test_defaults():
    config = PagedKVConfig(**SHAPE)
    assert config.num_qo_heads == 2
    assert (config.max_num_pages, config.page_size, config.layout) == (2048, 128, "NHD")
    assert (config.cpu_offload_pages, config.prefix_cache, config.prefix_cache_salt) == (0, True, "")
    assert (config.admission_fit, config.admission_order) == ("sum", "fifo")
    assert (config.backfill_protect, config.backfill_window) == ("easy", 128)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("layout", "HND", "NHD"),
        ("admission_fit", "most", "sum, peak, none"),
        ("admission_fit", None, "sum, peak, none"),
        ("admission_order", "lifo", "fifo, backfill"),
        ("backfill_protect", "conservative", "easy"),
        ("backfill_window", 0, ">= 1"),
        ("cpu_offload_pages", -1, ">= 0"),
        ("cpu_offload_pages", True, ">= 0"),
        ("max_num_pages", 1, ">= 2"),
        ("page_size", 1.0, ">= 1"),
        ("prefix_cache", 1, "bool"),
        ("prefix_cache_salt", None, "str"),
        ("num_qo_heads", 3, "no multiple"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name, value, allowed):
    with pytest.raises(ValueError, match=f"{name}.*{allowed}"):
        PagedKVConfig(**SHAPE | {name: value})


@pytest.mark.parametrize(
    ("qo", "kv", "shards", "expected"),
    [(8, 2, 1, (8, 2)), (8, 2, 2, (4, 1)), (8, 4, 2, (4, 2)), (8, 2, 4, (2, 1)), (8, 2, 8, (1, 1)), (6, 1, 3, (2, 1))],
)
def test_shards_split_heads_and_replicate_kv_heads_that_are_too_few(qo, kv, shards, expected):
    config = PagedKVConfig(**SHAPE | {"num_qo_heads": qo, "num_kv_heads": kv}).shard(shards)
    assert (config.num_qo_heads, config.num_kv_heads) == expected
    assert config.shard(shards) == config


@pytest.mark.parametrize(("qo", "kv", "shards"), [(9, 3, 2), (6, 2, 3), (8, 2, 16), (8, 2, 0)])
def test_heads_that_do_not_divide_are_refused(qo, kv, shards):
    with pytest.raises(ValueError, match="shards"):
        PagedKVConfig(**SHAPE | {"num_qo_heads": qo, "num_kv_heads": kv}).shard(shards)


def test_a_sharded_cache_is_not_sharded_another_way():
    with pytest.raises(ValueError, match="2 ways already"):
        PagedKVConfig(**SHAPE).shard(2).shard(4)


def test_the_environment_wins(monkeypatch):
    config = PagedKVConfig(**SHAPE, admission_fit="none", backfill_window=4)
    assert config.with_environment() is config
    monkeypatch.setenv("MSTAR_KV_ADMISSION_FIT", "peak")
    monkeypatch.setenv("MSTAR_KV_ADMISSION_ORDER", "backfill")
    monkeypatch.setenv("MSTAR_KV_BACKFILL_WINDOW", "7")
    changed = config.with_environment()
    assert (changed.admission_fit, changed.admission_order, changed.backfill_window) == ("peak", "backfill", 7)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MSTAR_KV_ADMISSION_FIT", "all"), ("MSTAR_KV_ADMISSION_ORDER", "easy"), ("MSTAR_KV_BACKFILL_WINDOW", "0")],
)
def test_a_malformed_variable_is_refused_by_name(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable):
        PagedKVConfig(**SHAPE).with_environment()
