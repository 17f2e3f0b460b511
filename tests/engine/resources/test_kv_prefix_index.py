"""The prefix index: longest whole-page match, ids compared on a hit, first writer wins, idle leaves evicted first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.prefix import keys as keys_module
from mstar.engine.resources.kv.prefix.index import PrefixIndex
from mstar.engine.resources.kv.prefix.keys import PrefixItem

SIZE = 4


class Cache:
    """An index and the streams that write into it."""

    def __init__(self, pages=32, root=b"root"):
        self.arena = PageArena(pages)
        self.index = PrefixIndex(self.arena, SIZE, root)

    def write(self, ids, salt="", items=()):
        """A stream that stores ``ids`` from its first page on and offers all full pages; the pages it holds."""
        ids = np.asarray(ids)
        _, keys = self.index.keys(ids, items, salt)
        pages = self.arena.try_allocate(len(keys))
        parents = [None, *keys][: len(keys)]
        taken = [
            self.index.insert(parent, key, ids[i * SIZE : (i + 1) * SIZE], int(pages[i]))
            for i, (parent, key) in enumerate(zip(parents, keys, strict=True))
        ]
        return pages, taken

    def leave(self, pages):
        self.arena.release(pages)

    def found(self, ids, **of):
        return self.index.match(np.asarray(ids), **of).pages.tolist()

    def check(self, *held):
        self.arena.check(np.concatenate([self.index.pages(), *held]).astype(np.int64))


PROMPT = np.arange(100, 116)  # four pages


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (15, 3), (16, 3)],
)
def test_whole_pages_match_but_never_the_last_token(length, expected):
    cache = Cache()
    pages, _ = cache.write(PROMPT)
    assert cache.found(PROMPT[:length]) == pages[:expected].tolist()


def test_a_match_ends_at_the_first_difference():
    cache = Cache()
    pages, _ = cache.write(PROMPT)
    other = PROMPT.copy()
    other[9] = 7
    assert cache.found(np.append(other, 1)) == pages[:2].tolist()
    assert cache.found(np.append(PROMPT, [5, 6, 7, 8, 9])) == pages.tolist()


def test_a_match_knows_the_keys_of_the_whole_prompt():
    cache = Cache()
    cache.write(PROMPT[:4])
    match = cache.index.match(PROMPT)
    assert match.num_pages == 1
    assert len(match.keys) == 4
    assert (match.root, match.keys) == cache.index.keys(PROMPT)


def test_the_first_writer_wins_and_the_losers_page_stays_private():
    cache = Cache()
    first, taken = cache.write(PROMPT)
    assert all(taken)
    second, taken = cache.write(PROMPT)
    assert not any(taken)
    assert cache.found(np.append(PROMPT, 1)) == first.tolist()
    assert not cache.arena.is_sealed(second).any()
    cache.leave(second)
    cache.check(first)


def test_the_index_seals_and_owns_what_it_takes():
    cache = Cache()
    pages, _ = cache.write(PROMPT)
    assert cache.arena.is_sealed(pages).all()
    assert (cache.arena.owners(pages) == 2).all()
    cache.leave(pages)
    assert cache.arena.num_free == 31 - 4
    cache.check()


def test_a_page_behind_one_that_is_not_indexed_is_refused():
    cache = Cache()
    _, keys = cache.index.keys(PROMPT)
    page = cache.arena.try_allocate(1)
    assert not cache.index.insert(keys[0], keys[1], PROMPT[4:8], int(page[0]))
    assert len(cache.index) == 0
    cache.check(page)


def test_a_page_holds_one_entry_only():
    cache = Cache()
    pages, _ = cache.write(PROMPT[:4])
    assert not cache.index.insert(None, b"another", PROMPT[:4], int(pages[0]))
    assert len(cache.index) == 1


class TestWhatKeepsPrefixesApart:
    @pytest.mark.parametrize("salt", ["a", "root"])
    def test_a_requests_salt(self, salt):
        cache = Cache()
        cache.write(PROMPT)
        assert cache.found(PROMPT, salt=salt) == []
        pages, _ = cache.write(PROMPT, salt=salt)
        assert cache.found(PROMPT, salt=salt) == pages[:3].tolist()

    def test_the_root(self):
        first, second = Cache(root=b"one"), Cache(root=b"two")
        assert not set(first.index.keys(PROMPT)[1]) & set(second.index.keys(PROMPT)[1])

    def test_an_item_from_its_first_page_on(self):
        cache = Cache()
        cat, dog = ([PrefixItem(5, 6, animal)] for animal in (b"cat", b"dog"))
        pages, _ = cache.write(PROMPT, items=cat)
        assert cache.found(PROMPT, items=cat) == pages[:3].tolist()
        assert cache.found(PROMPT, items=dog) == pages[:1].tolist()
        assert cache.found(PROMPT) == pages[:1].tolist()

    def test_the_token_ids_when_all_keys_collide(self, monkeypatch):  # BC-49
        monkeypatch.setattr(keys_module, "_page_key", lambda *_: b"constant")
        cache = Cache()
        a, b = np.arange(40), np.arange(1000, 1040)
        pages, taken = cache.write(a)
        assert taken == [True] + [False] * 9
        assert cache.found(a) == pages[:1].tolist()  # the second page's key finds the first page: not its content
        assert cache.found(b) == []
        cache.write(b)
        assert cache.found(b) == []

    def test_the_depth_when_keys_collide(self, monkeypatch):
        monkeypatch.setattr(keys_module, "_page_key", lambda *_: b"constant")
        cache = Cache()
        same = np.full(12, 7)
        pages, _ = cache.write(same)
        assert cache.found(same) == pages[:1].tolist()


class TestLeases:
    def test_a_leased_match_is_not_evicted(self):
        cache = Cache()
        pages, _ = cache.write(PROMPT)
        cache.leave(pages)
        match = cache.index.match(PROMPT)
        cache.index.lease(match)
        assert cache.index.num_evictable == 1
        assert cache.index.evict(4) == 1
        cache.check(match.pages)
        cache.index.release(match)
        assert cache.index.evict(4) == 3
        cache.check()

    def test_trimming_gives_the_rest_back(self):
        cache = Cache()
        pages, _ = cache.write(PROMPT)
        cache.leave(pages)
        match = cache.index.match(PROMPT)
        cache.index.lease(match)
        trimmed = cache.index.trim(match, 1)
        assert trimmed.pages.tolist() == pages[:1].tolist()
        assert trimmed.keys == match.keys
        cache.check(trimmed.pages)
        assert cache.index.num_evictable == 3

    def test_pages_others_use_are_told_from_idle_ones(self):
        cache = Cache()
        pages, _ = cache.write(PROMPT)
        assert cache.index.num_in_use(pages) == 4
        cache.leave(pages[2:])
        assert cache.index.num_in_use(pages) == 2

    def test_counters(self):
        cache = Cache()
        cache.index.lease(cache.index.match(PROMPT))
        cache.write(PROMPT)
        cache.index.match(PROMPT)  # a look counts nothing
        match = cache.index.match(PROMPT)
        cache.index.lease(match)
        assert cache.index.counters == {"misses": 1, "hits": 1, "hit_tokens": 12, "insertions": 4}
        cache.index.trim(match, 2)
        assert cache.index.counters["hit_tokens"] == 8


class TestEviction:
    def test_leaves_first_from_the_end_of_a_chain(self):
        cache = Cache()
        pages, _ = cache.write(PROMPT)
        cache.leave(pages)
        for left in (3, 2, 1, 0):
            assert cache.index.evict(1) == 1
            assert cache.found(np.append(PROMPT, 1)) == pages[:left].tolist()
        assert cache.index.evict(1) == 0
        assert cache.arena.num_free == cache.arena.num_usable
        assert cache.index.counters["evictions"] == 4

    def test_the_longest_unused_leaf_goes_first(self):
        cache = Cache()
        prompts = [np.array([start, 0, 0, 0, 1]) for start in (1, 2, 3)]
        for ids in prompts:
            cache.leave(cache.write(ids)[0])
        match = cache.index.match(prompts[0])
        cache.index.lease(match)
        cache.index.release(match)
        assert cache.index.evict(1) == 1
        assert [bool(cache.found(ids)) for ids in prompts] == [True, False, True]
        assert cache.index.evict(1) == 1
        assert [bool(cache.found(ids)) for ids in prompts] == [True, False, False]

    def test_what_was_used_since_the_last_eviction_is_spared(self):
        cache = Cache()
        prompts = [np.array([start, 0, 0, 0, 1]) for start in range(4)]
        for ids in prompts:
            cache.leave(cache.write(ids)[0])
        assert cache.index.evict(1) == 1
        match = cache.index.match(prompts[1])
        cache.index.lease(match)
        cache.index.release(match)
        assert cache.index.evict(2) == 2
        assert [bool(cache.found(ids)) for ids in prompts] == [False, True, False, False]
        assert cache.index.evict(1) == 1
        assert len(cache.index) == 0

    def test_a_shared_beginning_outlives_its_branches(self):
        cache = Cache()
        trunk = PROMPT[:8]
        branches = [np.append(trunk, [start, 0, 0, 0, 1]) for start in (1, 2)]
        for ids in branches:
            cache.leave(cache.write(ids)[0])
        assert len(cache.index) == 4
        assert cache.index.evict(2) == 2
        assert len(cache.found(branches[0])) == len(cache.found(branches[1])) == 2
        assert cache.index.evict(9) == 2

    def test_pages_in_use_are_never_taken(self):
        cache = Cache()
        pages, _ = cache.write(PROMPT)
        assert cache.index.num_evictable == 0
        assert cache.index.evict(4) == 0
        cache.leave(pages[3:])
        assert cache.index.evict(4) == 1
        cache.check(pages[:3])

    def test_an_idle_beginning_can_go_before_a_rest_in_use(self):
        """A stream that released its oldest pages still holds the later ones."""
        cache = Cache()
        pages, _ = cache.write(PROMPT)
        cache.leave(pages[:2])
        assert cache.index.num_evictable == 2
        assert cache.index.evict(9) == 2
        assert cache.found(PROMPT) == []
        cache.check(pages[2:])
        again, taken = cache.write(PROMPT)
        assert taken == [True, True, False, False]
        assert cache.found(np.append(PROMPT, 1)) == [*again[:2].tolist(), *pages[2:].tolist()]

    def test_an_entry_on_a_recycled_page_is_not_taken_for_the_old_one(self):
        cache = Cache(pages=4)
        pages, _ = cache.write(PROMPT[:12])
        cache.leave(pages[:1])
        assert cache.index.evict(1) == 1
        other, taken = cache.write([9, 9, 9, 9])
        assert taken == [True]
        assert other.tolist() == pages[:1].tolist()
        cache.leave(other)
        cache.leave(pages[1:])  # their links still name the recycled page
        assert cache.index.evict(9) == 3
        cache.check()


prompts = st.lists(st.integers(0, 1), max_size=14)


@settings(max_examples=150, deadline=None)
@given(
    written=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=8),
    used=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5))),
    at_once=st.integers(1, 5),
)
def test_pages_go_leaf_by_leaf_the_longest_unused_first(written, used, at_once):
    """Prompts are paths in a tree of pages; ``used`` looks up the beginning of one."""
    cache = Cache(pages=64)
    last_use: dict[tuple[int, ...], tuple[int, int]] = {}
    for path in written:
        cache.leave(cache.write(np.repeat(path, SIZE))[0])
        for depth in range(1, len(path) + 1):
            last_use.setdefault(tuple(path[:depth]), (len(last_use), depth))
    for time, (i, depth) in enumerate(used, start=64):
        path = written[i % len(written)][:depth]
        match = cache.index.match(np.append(np.repeat(path, SIZE), 9))
        cache.index.lease(match)
        cache.index.release(match)
        last_use.update({tuple(path[:end]): (time, 0) for end in range(1, len(path) + 1)})

    def is_there(path):
        return len(cache.found(np.append(np.repeat(path, SIZE), 9))) == len(path)

    while last_use:
        for _ in range(min(at_once, len(last_use))):
            leaves = [path for path in last_use if not any(other[:-1] == path for other in last_use)]
            del last_use[min(leaves, key=lambda path: last_use[path])]
        cache.index.evict(at_once)
        everything = {tuple(path[:end]) for path in written for end in range(1, len(path) + 1)}
        assert {path for path in everything if is_there(path)} == last_use.keys()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["write", "leave", "lease", "unlease", "evict"]), prompts, st.integers(0, 9)))
)
def test_what_the_index_can_free_is_what_it_says(operations):
    cache = Cache(pages=12)
    held, leases = [], []
    for name, ids, n in operations:
        ids = np.array(ids, np.int64)
        if name == "write" and len(ids) // SIZE <= cache.arena.num_free:
            held.append(cache.write(ids)[0])
        elif name == "leave" and held:
            cache.leave(held.pop(n % len(held)))
        elif name == "lease":
            leases.append(cache.index.match(ids))
            cache.index.lease(leases[-1])
        elif name == "unlease" and leases:
            cache.index.release(leases.pop(n % len(leases)))
        elif name == "evict":
            evictable = cache.index.num_evictable
            assert cache.index.evict(n) == min(n, evictable)
        cache.check(*held, *(match.pages for match in leases))
    for pages in held:
        cache.leave(pages)
    for match in leases:
        cache.index.release(match)
    cached = cache.arena.num_usable - cache.arena.num_free
    assert cache.index.evict(99) == cached
    assert cache.arena.num_free == cache.arena.num_usable
