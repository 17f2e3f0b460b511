"""Streams: arrays grow by label, pages are owned once, and every change of content moves the generation."""

import numpy as np
import pytest

from mstar.engine.resources.kv.pages import SINK_PAGE, PageArena
from mstar.engine.resources.kv.streams import Streams

ROWS = 3


@pytest.fixture
def arena():
    return PageArena(20)


@pytest.fixture
def streams(arena):
    return Streams(arena, 4, 5, ROWS)


def give(streams, arena, stream, pages, tokens):
    streams.append(np.array([stream]), np.array([pages]), arena.try_allocate(pages))
    streams.stored_len[stream] = tokens


def test_main_has_the_numbers_of_the_rows_and_each_new_label_the_next(streams):
    rows = np.array([2, 0])
    assert streams.of("main", rows) is rows
    assert streams.of("b", rows).tolist() == [5, 3]
    assert streams.of("a", rows).tolist() == [8, 6]
    assert streams.of("b", rows).tolist() == [5, 3]
    assert streams.labels == ("main", "b", "a")
    assert streams.of_rows(np.array([1])).tolist() == [1, 4, 7]
    for array in (streams.stored_len, streams.num_pages, streams.generation, streams.page_table):
        assert len(array) == 9


def test_a_new_label_keeps_what_the_others_hold(streams, arena):
    give(streams, arena, 1, 2, 7)
    streams.of("b", np.array([0]))
    assert streams.held_pages(np.array([1])).tolist() == [1, 2]
    assert (streams.stored_len[1], streams.page_table[3:].max()) == (7, SINK_PAGE)
    give(streams, arena, 4, 1, 3)
    stored, held = streams.by_row()
    assert (stored.tolist(), held.tolist()) == ([0, 7, 0], [0, 3, 0])


@pytest.mark.parametrize("counts", [[1, 1], [2, 1], [0, 3], [0, 0]])
def test_appended_pages_follow_those_held(streams, arena, counts):
    give(streams, arena, 0, 1, 4)
    pages = arena.try_allocate(sum(counts))
    streams.append(np.array([0, 2]), np.array(counts), pages)
    assert streams.held_pages(np.array([0])).tolist() == [1, *pages[: counts[0]].tolist()]
    assert streams.held_pages(np.array([2])).tolist() == pages[counts[0] :].tolist()
    arena.check(streams.all_pages())


def test_pages_behind_the_protected_ones_are_released_and_the_rest_moves_up(streams, arena):
    give(streams, arena, 0, 5, 18)
    streams.release_behind(0, 1, 2)
    assert streams.page_table[0].tolist() == [1, 4, 5, SINK_PAGE, SINK_PAGE]
    assert (streams.num_pages[0], streams.stored_len[0]) == (3, 10)
    arena.check(streams.all_pages())


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda s: s.release(np.array([0])), (0, 0)),
        (lambda s: s.rewind(np.array([0])), (0, 2)),
        (lambda s: s.release_behind(0, 0, 1), (3, 1)),
        (lambda s: s.take_out(0), (0, 0)),
        (lambda s: s.put_in(0, s.page_table[0, :1].copy(), 2), (2, 1)),
    ],
    ids=["release", "rewind", "release_behind", "take_out", "put_in"],
)
def test_every_change_of_content_moves_the_generation(streams, arena, change, left):
    give(streams, arena, 0, 2, 7)
    generation = streams.generation.copy()
    change(streams)
    assert streams.generation[0] > generation[0]
    assert streams.generation[1:].tolist() == generation[1:].tolist()
    assert (streams.stored_len[0], streams.num_pages[0]) == left


def test_reserved_pages_do_not_move_it(streams, arena):
    give(streams, arena, 0, 2, 7)
    assert not streams.generation.any()
