"""Threads that read requests."""

from __future__ import annotations

import threading

from mstar.serving.readers import ReaderPool


def test_a_slow_request_does_not_hold_up_the_next_ones():
    slow, done, read = threading.Event(), threading.Event(), []

    def take(number: int) -> None:
        if number == 0:
            assert slow.wait(5)
        read.append(number)
        if len(read) == 8:
            done.set()

    pool = ReaderPool(take, size=2)
    for number in range(9):
        pool.put(number)
    assert done.wait(5)
    assert read == list(range(1, 9))
    slow.set()
    pool.close()
    assert read[-1] == 0


def test_close_works_off_what_was_put_and_leaves_no_thread():
    before, read = threading.active_count(), []
    pool = ReaderPool(read.append, size=3)
    assert threading.active_count() == before + 3
    for number in range(1, 50):
        pool.put(number)
    pool.close()
    assert sorted(read) == list(range(1, 50))
    assert threading.active_count() == before
