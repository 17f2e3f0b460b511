"""The page of counters, and whether its beat is stale."""

import time

import pytest

from mstar.runtime.board import Board, EngineState, Slot, StaleCheck


def test_a_reader_sees_what_the_writer_wrote(tmp_path):
    writer = Board.create(tmp_path / "board")
    reader = Board.open(tmp_path / "board")
    writer[Slot.QUEUED] = 5
    writer[Slot.STATE] = EngineState.DRAINING
    writer.beat()
    assert (reader.queued, reader.state, reader.is_draining) == (5, EngineState.DRAINING, True)
    assert 0 <= time.monotonic_ns() - reader[Slot.BEAT_NS] < 10**9
    with pytest.raises(ValueError, match="read-only"):
        reader[Slot.QUEUED] = 1


def test_there_is_no_board_before_the_engine():
    with pytest.raises(FileNotFoundError):
        Board.open(__import__("pathlib").Path("/no/board"))


def test_a_moving_beat_is_never_stale_and_one_that_stands_is_after_the_limit():
    check = StaleCheck(limit_s=0.05, min_looks=3)
    assert not any(check.is_stale(beat) for beat in range(50))
    time.sleep(0.06)
    assert [check.is_stale(49) for _ in range(3)] == [False, False, True]
