"""Who is asked for a cancel, how often, and what that costs."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
from serving_fakes import RecordingReply, wait_until

from mstar.serving import cancels
from mstar.serving.cancels import ASKS, CPU_SHARE, ROUND_S, SHARE, CancelPoll


@dataclass
class Request:
    """What the poll needs of ``Sequences``."""

    reply: RecordingReply
    is_abandoned: bool = False
    request_id: str = ""


class Virtual:
    """A poll of ``num_open`` requests in virtual time, in which an ask takes ``trip_s``, and ``cpu_s`` of a core."""

    def __init__(self, monkeypatch, num_open: int, trip_s: float, cpu_s: float = 11e-6) -> None:
        self.now, self.trip_s, self.asking_s = 0.0, trip_s, 0.0
        self.cpu, self.cpu_s = 0.0, cpu_s
        self.asked: dict[int, list[float]] = {number: [] for number in range(num_open)}
        self.cancelled: list[int] = []
        self.open = {number: Request(RecordingReply()) for number in range(num_open)}
        for number, request in self.open.items():
            request.reply.is_cancelled = lambda number=number: self.ask(number)
        self.poll = CancelPoll(self.open, lambda number, _: self.cancelled.append(number))
        monkeypatch.setattr(cancels.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(cancels.time, "thread_time", lambda: self.cpu)

    def ask(self, number: int) -> bool:
        self.now += self.trip_s
        self.asking_s += self.trip_s
        self.cpu += self.cpu_s
        self.asked[number].append(self.now)
        return False

    def run(self, seconds: float) -> None:
        while self.now < seconds:
            rest_s = self.poll._go()
            self.now += rest_s

    @property
    def longest_s(self) -> float:
        """Between two asks of one request, or before its first."""
        gaps = [b - a for times in self.asked.values() for a, b in zip([0.0, *times], times, strict=False)]
        return max(gaps)


@pytest.mark.parametrize(
    ("num_open", "trip_us", "cpu_us", "longest_ms"),
    [
        (1, 40, 11, 21),
        (64, 40, 11, 22),
        (256, 40, 11, 40),
        (256, 25, 6, 30),
        (256, 400, 11, 210),  # the interpreter is busy
        (1024, 40, 11, 150),
        (1024, 110, 26, 350),
    ],
)
def test_a_cancel_is_noticed_within(monkeypatch, num_open, trip_us, cpu_us, longest_ms):
    polled = Virtual(monkeypatch, num_open, trip_us / 1e6, cpu_us / 1e6)
    polled.run(3.0)
    assert polled.longest_s <= longest_ms / 1e3
    assert polled.cpu <= CPU_SHARE * polled.now * 1.05
    assert polled.asking_s <= SHARE * polled.now * 1.05
    assert min(map(len, polled.asked.values())) > 0


@pytest.mark.parametrize("num_open", [1, 64, 65, 256])
def test_where_an_ask_costs_nothing_all_are_asked_in_every_round(monkeypatch, num_open):
    polled = Virtual(monkeypatch, num_open, 0.0, 0.0)
    polled.run(100 * ROUND_S)
    assert {len(times) for times in polled.asked.values()} <= {99, 100, 101}


def test_the_share_of_time_holds_however_slow_the_server_answers(monkeypatch):
    polled = Virtual(monkeypatch, 100, 0.01)
    polled.run(60.0)
    assert polled.asking_s <= SHARE * polled.now * 1.05
    assert min(map(len, polled.asked.values())) >= 10


def test_of_many_only_a_few_are_asked_in_one_go(monkeypatch):
    polled = Virtual(monkeypatch, 200, 1e-6, 1e-6)
    counts = []
    for _ in range(4):
        before = sum(map(len, polled.asked.values()))
        polled.poll._go()
        counts.append(sum(map(len, polled.asked.values())) - before)
    assert counts == [ASKS, ASKS, ASKS, 200 - 3 * ASKS]


@pytest.fixture
def running():
    """Open requests, and those that were found cancelled, of a poll on its thread."""
    requests, found = {}, []

    def on_cancel(number, sequences):
        sequences.is_abandoned = True
        found.append(number)

    poll = CancelPoll(requests, on_cancel)
    poll.start()
    yield requests, found
    poll.stop()
    assert "mstar-cancel" not in {thread.name for thread in threading.enumerate()}


def test_a_cancelled_request_is_told_once(running):
    requests, found = running
    requests |= {number: Request(RecordingReply()) for number in range(300)}
    requests[299].reply.cancelled = requests[7].reply.cancelled = True
    wait_until(lambda: len(found) == 2)
    time.sleep(5 * ROUND_S)
    assert sorted(found) == [7, 299]


def test_one_that_cannot_be_asked_keeps_nobody_from_being_asked(running):
    requests, found = running

    def broken() -> bool:
        raise RuntimeError("the server cannot say")

    first, second = Request(RecordingReply()), Request(RecordingReply())
    first.reply.is_cancelled = broken
    second.reply.cancelled = True
    requests |= {1: first, 2: second}
    wait_until(lambda: found == [2])
