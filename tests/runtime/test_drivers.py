"""Two places for an engine, and reports that say the same."""

from __future__ import annotations

import itertools
import queue
from types import SimpleNamespace

import numpy as np
import pytest

from mstar.conductor.report import empty_report
from mstar.conductor.request import LOGPROB
from mstar.runtime.drivers import InChild, InProcess
from mstar.runtime.messages import TokenRows
from mstar.utils.errors import EngineFault, ErrorCode


@pytest.fixture
def child():
    """A child's driver without the child: what its engine says is said here."""
    driver = InChild.__new__(InChild)
    driver._events = queue.SimpleQueue()
    return driver


def test_what_a_child_says_becomes_reports(child):
    records = np.zeros(1, LOGPROB)
    tickets, tokens, finish = np.array([4, 5]), np.array([7, -1], np.int32), np.array([0, 1], np.uint8)
    child.on_prompt_logprobs(4, records)
    child.on_tokens(TokenRows(tickets, tokens, finish, np.array([0]), records))
    child.on_tokens(TokenRows(tickets, tokens, finish))
    child.on_failed(6, ErrorCode.UNAVAILABLE, "full")
    prompt, told, plain, failed = (child.poll() for _ in range(4))
    ((ticket, logprobs),) = [(each.ticket, each.logprobs) for each in prompt.prompt_logprobs]
    assert ticket == 4
    assert logprobs is records
    assert (told.tickets.tolist(), told.tokens.tolist(), told.finish.tolist()) == ([4, 5], [7, -1], [0, 1])
    assert told.logprob_rows.tolist() == [0]
    assert told.logprobs is records
    assert (plain.logprob_rows, plain.logprobs) == (None, None)
    assert [(each.ticket, each.code, each.message) for each in failed.failures] == [(6, ErrorCode.UNAVAILABLE, "full")]


def test_a_lost_child_is_told_to_whoever_asks(child):
    child.on_engine_lost("it ended")
    for _ in range(2):
        with pytest.raises(EngineFault, match="it ended"):
            child.poll()


def test_an_engine_in_this_process_is_not_asked_without_pause(monkeypatch):
    driver = InProcess.__new__(InProcess)
    steps = itertools.chain([empty_report()], iter(lambda: empty_report(failures=["failed"]), None))
    driver.core = SimpleNamespace(step=lambda: next(steps), engine=SimpleNamespace(device_failure=None))
    pauses = []
    monkeypatch.setattr("mstar.runtime.drivers.time.sleep", pauses.append)
    driver.poll()
    assert pauses == [0.001]
    driver.poll()
    assert pauses == [0.001]
