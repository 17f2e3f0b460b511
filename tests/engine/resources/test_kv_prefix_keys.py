"""Page keys: the exact bytes that are hashed, and that different things never have one key."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.engine.resources.kv.prefix.keys import (
    PageItem,
    PrefixItem,
    chain_root,
    fields_key,
    page_key,
    page_keys,
    prefix_root,
)

ROOT = {
    "checkpoint": "smol",
    "config": "30x3x64",
    "layout": "NHD",
    "page_size": 16,
    "dtype": "float32",
    "world_size": 1,
    "salt": "",
}


def little(*numbers):
    return b"".join(struct.pack("<I", number) for number in numbers)


@pytest.mark.parametrize(
    ("prev", "ids", "items", "hashed"),
    [
        (b"", [], (), little(0, 0, 0)),
        (b"ab", [1, 258], (), little(2) + b"ab" + little(8, 1, 258) + little(0)),
        (b"", [7], (PageItem(3, 5, 9, b"xyz"),), little(0, 4, 7) + little(19, 3, 5, 9, 3) + b"xyz"),
        (
            b"p",
            [0],
            (PageItem(0, 0, 1, b""), PageItem(1, 0, 2, b"d")),
            little(1) + b"p" + little(4, 0) + little(33, 0, 0, 1, 0, 1, 0, 2, 1) + b"d",
        ),
    ],
)
def test_the_hashed_bytes(prev, ids, items, hashed):
    assert page_key(prev, np.array(ids, np.int64), items) == hashlib.sha256(hashed).digest()


def test_a_prompts_keys_are_chained_over_its_full_pages():
    ids = np.arange(11)
    first = page_key(b"root", ids[:4])
    second = page_key(first, ids[4:8])
    assert page_keys(b"root", ids, (), 4) == [first, second]
    assert page_keys(b"root", ids[:3], (), 4) == []


def test_every_page_an_item_touches_carries_it():
    ids = np.zeros(20, np.int64)
    item = PrefixItem(start=6, length=9, digest=b"cat")
    keys = page_keys(b"r", ids, [item], 4)
    parts = [(), (PageItem(2, 0, 9, b"cat"),), (PageItem(0, 2, 9, b"cat"),), (PageItem(0, 6, 9, b"cat"),), ()]
    prev = b"r"
    for key, part in zip(keys, parts, strict=True):
        prev = page_key(prev, ids[:4], part)
        assert key == prev


@pytest.mark.parametrize(
    "other",
    [
        PrefixItem(6, 9, b"dog"),  # other content
        PrefixItem(7, 9, b"cat"),  # elsewhere
        PrefixItem(6, 10, b"cat"),  # longer, though equal on the first page
    ],
)
def test_another_item_changes_the_keys_from_its_first_page(other):
    ids = np.zeros(16, np.int64)
    keys = page_keys(b"r", ids, [PrefixItem(6, 9, b"cat")], 4)
    others = page_keys(b"r", ids, [other], 4)
    assert keys[0] == others[0]
    assert not set(keys[1:]) & set(others[1:])


@pytest.mark.parametrize(("name", "value"), [*((n, "x") for n in ROOT if n not in ("page_size", "world_size"))])
def test_each_text_of_the_root_counts_under_its_own_name(name, value):
    roots = {name: prefix_root(**ROOT | {name: value})}
    roots |= {other: prefix_root(**ROOT | {other: value}) for other in ("checkpoint", "salt") if other != name}
    assert len({prefix_root(**ROOT), *roots.values()}) == len(roots) + 1


@pytest.mark.parametrize("name", ["page_size", "world_size"])
def test_each_number_of_the_root_counts(name):
    assert prefix_root(**ROOT | {name: 7}) != prefix_root(**ROOT)


class TestSaltsAndAdaptersOfEqualStrings:  # BC-49
    def test_a_value_belongs_to_its_field(self):
        assert fields_key({"salt": "a"}) != fields_key({"adapter": "a"})
        assert fields_key({"salt": "a", "adapter": ""}) != fields_key({"salt": "", "adapter": "a"})

    def test_the_caches_salt_is_not_the_requests(self):
        salted_cache = chain_root(prefix_root(**ROOT | {"salt": "a"}))
        salted_request = chain_root(prefix_root(**ROOT), "a")
        assert len({salted_cache, salted_request, chain_root(prefix_root(**ROOT))}) == 3

    def test_a_value_cannot_reach_into_the_next(self):
        assert fields_key({"salt": "ab", "adapter": "c"}) != fields_key({"salt": "a", "adapter": "bc"})
        assert fields_key({"salt": "1"}) != fields_key({"salt": 1}) != fields_key({"salt": b"1"})


texts = st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=4), st.binary(max_size=4), st.integers()))


@given(texts, texts)
def test_fields_have_one_key_only_if_they_are_equal(a, b):
    def exact(fields):
        return [(name, type(value), value) for name, value in fields.items()]

    assert (fields_key(a) == fields_key(b)) == (exact(a) == exact(b))
