"""The timetable of an unchanged decode batch: the pages that a look at every row would give, or no answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.kv.pace import DecodePace
from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.streams import Streams

SIZE, LONGEST = 4, 40


class Batch:
    """Streams of given lengths whose pages hold just those; each step stores a token in every one."""

    def __init__(self, lengths, total=8):
        self.arena = PageArena(total * LONGEST // SIZE + 1)
        self.streams = Streams(self.arena, SIZE, LONGEST // SIZE, total)
        for row, length in enumerate(lengths):
            self.streams.put_in(row, self.arena.try_allocate(-(-length // SIZE)), length)
        self.rows = np.arange(len(lengths))[::-1].copy()
        self.pace = DecodePace(self.rows, self.streams, SIZE, LONGEST)

    def looked_up(self):
        """The rows that have no room for a token."""
        full = self.streams.stored_len[self.rows] == self.streams.num_pages[self.rows] * SIZE
        return sorted(self.rows[full].tolist())

    def serve(self):
        due = self.pace.due()
        if due is None:
            assert self.pace.is_young
            due = np.array(self.looked_up(), np.int64)
        self.streams.append_one(due, self.arena.try_allocate(due.size))
        self.pace.served()

    def step(self):
        before = self.streams.epoch
        self.streams.advance(self.rows, np.ones(self.rows.size, np.int64), self.rows)
        self.pace.stepped(self.rows, before)


@pytest.fixture
def batch():
    """After two steps, with the second's pages there."""
    batch = Batch([2, 3, 6])
    batch.step()
    batch.serve()
    batch.step()
    return batch


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), steps=st.integers(1, 25))
def test_the_rows_that_are_due_are_those_without_room_for_a_token(lengths, steps):
    batch = Batch([length if length % SIZE else length - 1 for length in lengths])
    for step in range(steps):
        batch.step()
        assert batch.pace.is_kept_by(batch.rows)
        due = batch.pace.due()
        assert (due is None) == (step == 0), "no timetable before the third step"
        assert due is None or sorted(due.tolist()) == batch.looked_up()
        batch.serve()
        assert batch.pace.due().size == 0, "asked again before the step is committed"


def test_the_longest_stream_must_be_looked_up():
    batch = Batch([LONGEST - 2, 3])
    batch.step()
    batch.serve()
    batch.step()
    assert batch.streams.stored_len[0] == LONGEST
    assert batch.pace.due() is None


def test_pages_in_reserve_must_be_looked_up():
    batch = Batch([2, 1])
    batch.streams.append_one(np.array([1]), batch.arena.try_allocate(1))
    batch.pace = DecodePace(batch.rows, batch.streams, SIZE, LONGEST)
    batch.step()
    batch.serve()
    batch.step()
    assert not batch.pace.is_young
    assert batch.pace.due() is None


@pytest.mark.parametrize(
    "touch",
    [
        lambda streams, arena: streams.rewind(np.array([0])),
        lambda streams, arena: streams.release(np.array([1])),
        lambda streams, arena: streams.release_row(5),
        lambda streams, arena: streams.append_one(np.array([0]), arena.try_allocate(1)),
        lambda streams, arena: streams.advance(np.array([2]), np.array([1]), np.array([2])),
    ],
)
def test_whatever_else_touches_a_stream_ends_it(batch, touch):
    assert batch.pace.is_kept_by(batch.rows)
    touch(batch.streams, batch.arena)
    assert not batch.pace.is_kept_by(batch.rows)
    batch.step()
    assert not batch.pace.is_kept_by(batch.rows), "a step of its own does not bring it back"


def test_another_batch_does_not_keep_it(batch):
    assert not batch.pace.is_kept_by(batch.rows.copy())
