"""The page arena: owners are counted, seals end with the last owner, every page is free or owned, once."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.kv.pages import SINK_PAGE, PageArena


def pages(*numbers):
    return np.array(numbers, np.int32)


def test_the_sink_page_is_never_handed_out():
    arena = PageArena(10)
    assert arena.num_usable == arena.num_free == 9
    assert sorted(arena.try_allocate(9)) == list(range(1, 10))
    arena.check(np.arange(1, 10))


def test_allocation_is_all_or_nothing():
    arena = PageArena(5)
    assert arena.try_allocate(5) is None
    assert arena.num_free == 4
    assert arena.try_allocate(0).size == 0


def test_pages_come_back_in_the_order_they_were_freed():
    arena = PageArena(5)
    arena.try_allocate(4)
    arena.release(pages(3, 1))
    arena.release(pages(4))
    assert arena.try_allocate(3).tolist() == [3, 1, 4]


def test_the_free_list_wraps_round():
    arena = PageArena(4)
    for expected in ([1, 2], [3, 1], [2, 3]):
        got = arena.try_allocate(2)
        assert got.tolist() == expected
        arena.release(got)


def test_a_page_is_freed_by_its_last_owner_which_ends_its_seal():
    arena = PageArena(5)
    page = arena.try_allocate(1)
    arena.seal(page)
    arena.share(page)
    arena.share(page)
    for left in (2, 1):
        arena.release(page)
        assert arena.owners(page).tolist() == [left]
        assert arena.is_sealed(page).all()
        assert arena.num_free == 3
    arena.release(page)
    assert arena.num_free == 4
    assert not arena.is_sealed(page).any()
    arena.check(pages())


def test_a_page_named_twice_gains_and_loses_two_owners():
    arena = PageArena(5)
    got = arena.try_allocate(2)
    arena.seal(got)
    arena.share(pages(1, 2, 1))
    assert arena.owners(got).tolist() == [3, 2]
    arena.release(pages(1, 1, 2, 1))
    assert arena.owners(got).tolist() == [0, 1]
    assert arena.num_free == 3
    arena.check(pages(2))


def test_idle_pages_are_the_sealed_ones_with_one_owner():
    arena = PageArena(6)
    got = arena.try_allocate(3)
    assert arena.num_idle == 0
    arena.seal(got[:2])
    arena.seal(got[:1])  # sealing twice changes nothing
    assert arena.num_idle == 2
    arena.share(pages(1, 1, 2))
    assert arena.num_idle == 0
    arena.release(pages(1, 2, 3))
    assert arena.num_idle == 1
    arena.release(pages(1, 1))
    assert arena.num_idle == 1
    arena.release(pages(2))
    assert arena.num_idle == 0


def test_the_version_moves_with_every_owner():
    arena = PageArena(6)
    seen = [arena.version]
    got = arena.try_allocate(2)
    seen.append(arena.version)
    arena.seal(got)
    arena.share(got)
    seen.append(arena.version)
    arena.release(got)
    seen.append(arena.version)
    assert seen == sorted(set(seen))
    assert arena.try_allocate(9) is None
    assert arena.version == seen[-1]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda arena: arena.release(pages(2, 2)), "freed twice"),
        (lambda arena: arena.release(pages(4)), "freed twice"),
        (lambda arena: arena.release(pages(SINK_PAGE)), "sink page is freed"),
        (lambda arena: arena.share(pages(4)), "free page is shared"),
        (lambda arena: arena.share(pages(SINK_PAGE)), "sink page is shared"),
        (lambda arena: arena.seal(pages(4)), "free page is sealed"),
    ],
)
def test_misuse_is_caught(misuse, message):
    arena = PageArena(6)
    arena.try_allocate(3)
    with pytest.raises(AssertionError, match=message):
        misuse(arena)


@pytest.mark.parametrize(
    ("references", "message"),
    [((1, 2), "differ"), ((1, 2, 3, 3), "differ"), ((1, 2, 4), "differ"), ((SINK_PAGE, 1, 2, 3), "differ")],
)
def test_the_check_finds_pages_that_are_lost_or_held_twice(references, message):
    arena = PageArena(6)
    arena.try_allocate(3)
    arena.check(pages(1, 2, 3))
    with pytest.raises(AssertionError, match=message):
        arena.check(pages(*references))


def test_the_check_finds_a_shared_page_that_may_still_be_written():
    arena = PageArena(6)
    arena.share(arena.try_allocate(1))
    with pytest.raises(AssertionError, match="not sealed"):
        arena.check(pages(1, 1))


class OwnersUnderRandomUse(RuleBasedStateMachine):
    """The model: a list of references, a set of seals."""

    def __init__(self):
        super().__init__()
        self.arena = PageArena(12)
        self.references = []
        self.sealed = set()

    @rule(n=st.integers(0, 12))
    def allocate(self, n):
        free = 11 - len(set(self.references))
        got = self.arena.try_allocate(n)
        assert (got is None) == (n > free)
        if got is not None:
            assert len(set(got.tolist())) == n
            self.references += got.tolist()

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def share(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.references)), max_size=6))
        self.arena.seal(pages(*chosen))
        self.arena.share(pages(*chosen))
        self.sealed |= set(chosen)
        self.references += chosen

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data):
        chosen = data.draw(st.permutations(self.references))[: data.draw(st.integers(0, 8))]
        for page in chosen:
            self.references.remove(page)
        self.arena.release(pages(*chosen))
        self.sealed &= set(self.references)

    @invariant()
    def owners_are_counted(self):
        self.arena.check(pages(*self.references))
        every = np.arange(1, 12)
        assert self.arena.owners(every).tolist() == [self.references.count(page) for page in every]
        assert set(every[self.arena.is_sealed(every)].tolist()) == self.sealed
        assert self.arena.num_free == 11 - len(set(self.references))


TestOwnersUnderRandomUse = OwnersUnderRandomUse.TestCase
TestOwnersUnderRandomUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_ten_thousand_random_operations_keep_every_page_free_or_owned_once_per_owner():
    """Streams (lists of pages) grow, share their beginnings, shrink and leave."""
    rng, arena = np.random.default_rng(0), PageArena(64)
    streams: list[np.ndarray] = []
    refused = 0
    for _ in range(10_000):
        choice = int(rng.integers(0, 4))
        if choice == 0 or not streams:
            n, free = int(rng.integers(0, 9)), arena.num_free
            got = arena.try_allocate(n)
            refused += got is None
            assert (got is None) == (n > free)
            if got is not None:
                streams.append(got)
        elif choice == 1:
            stream = streams[rng.integers(len(streams))]
            shared = stream[: int(rng.integers(0, stream.size + 1))]
            arena.seal(shared)
            arena.share(shared)
            streams.append(shared.copy())
        elif choice == 2:
            i = int(rng.integers(len(streams)))
            keep = int(rng.integers(0, streams[i].size + 1))
            arena.release(streams[i][keep:])
            streams[i] = streams[i][:keep]
        else:
            arena.release(streams.pop(int(rng.integers(len(streams)))))
        references = np.concatenate([*streams, pages()])
        arena.check(references)
        assert arena.num_free == arena.num_usable - np.unique(references).size
    assert refused > 100, "the pool was never full"
    for stream in streams:
        arena.release(stream)
    assert arena.num_free == arena.num_usable
    assert not arena.is_sealed(np.arange(64)).any()
