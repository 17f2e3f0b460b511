"""Requests whose grammars are compiled on threads before they join."""

from __future__ import annotations

import threading
import time

import pytest

from mstar.conductor.preparing import THREADS, Preparing
from mstar.conductor.queue import Waiting
from mstar.conductor.request import EngineRequest, FinishReason, Guide
from mstar.engine.inputs import RequestInfo
from mstar.utils.errors import ErrorCode, Unavailable

from .toy import Bench

SLOW, QUICK = Guide("regex", "slow"), Guide("regex", "quick")


def wait_for(condition) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture(params=[0, 1, 4], ids=["plain", "ahead", "queued"])
def bench(request):
    bench = Bench(steps_ahead=request.param, rows=4)
    yield bench
    bench.grammars.may_prepare.set()


def test_others_run_while_a_grammar_is_compiled(bench):
    slow = bench.submit([5, 6], 3, guide=SLOW)
    other = bench.submit([7], 5)
    assert (bench.conductor.num_running, bench.conductor.num_queued, bench.conductor.num_queued_tokens) == (1, 1, 2)
    while not bench.outcomes[other].finishes:
        bench.step()
    assert bench.outcomes[other].tokens == [7] * 5
    assert bench.conductor.has_work()
    assert (bench.outcomes[slow].tokens, bench.conductor.num_queued) == ([], 1)
    bench.grammars.may_prepare.set()
    bench.run()
    assert bench.outcomes[slow].tokens == [5, 6, 5]
    assert bench.grammars.accepted[slow] == [5, 6, 5]
    bench.assert_idle()


def test_a_malformed_grammar_is_refused_in_its_own_words(bench):
    rid = bench.submit([5], 3, guide=Guide("regex", "malformed"))
    bench.run()
    (failure,) = bench.outcomes[rid].failures
    assert (failure.code, failure.message) == (ErrorCode.INVALID_ARG, "guided_decoding_guide: malformed")
    assert not bench.echo.steps
    bench.assert_idle()


def test_a_crash_is_the_engines_own_error_and_is_logged(bench, caplog):
    rid = bench.submit([5], 3, guide=Guide("regex", "crashes"))
    bench.run()
    (failure,) = bench.outcomes[rid].failures
    assert failure.code is ErrorCode.INTERNAL
    assert "Panic: out of memory" in failure.message
    assert "could not be prepared" in caplog.text


@pytest.mark.parametrize("end", ["cancel", "finish", "fail_all", "deadline"])
def test_a_request_can_end_while_it_is_prepared(bench, end):
    rid = bench.submit([5], 3, guide=SLOW, deadline_ns=2000)
    match end:
        case "cancel":
            bench.conductor.cancel(rid)
        case "finish":
            bench.conductor.finish(rid, 0)
        case "fail_all":
            bench.conductor.fail_all(Unavailable("shutting down"))
        case "deadline":
            bench.now_ns = 2000
            bench.step()
    bench.run()
    outcome = bench.outcomes[rid]
    assert outcome.num_ends == (0 if end == "finish" else 1)
    assert outcome.finishes == ([FinishReason.CANCELLED] if end == "cancel" else [])
    assert all(failure.code is ErrorCode.UNAVAILABLE for failure in outcome.failures)
    bench.assert_idle()
    bench.grammars.may_prepare.set()
    wait_for(lambda: "slow" in bench.grammars.prepared)  # for nothing
    later = bench.submit([6], 2)
    bench.run()
    assert bench.outcomes[later].tokens == [6, 6]
    assert outcome.tokens == []


def test_draining_lets_it_go_on(bench):
    rid = bench.submit([5], 2, guide=SLOW)
    bench.conductor.drain()
    bench.grammars.may_prepare.set()
    bench.run()
    assert bench.outcomes[rid].finishes == [FinishReason.LENGTH]


def test_it_counts_as_queued_once_no_row_is_free():
    bench = Bench(rows=2, queued=1, queued_tokens=100)
    for _ in range(3):
        bench.submit([5], 2, guide=SLOW)
    with pytest.raises(Unavailable, match="max_queued_requests: at most 1"):
        bench.submit([5], 2, guide=SLOW)
    running = bench.submit([5], 2)  # a row is free for it now
    with pytest.raises(Unavailable, match="max_queued_requests: at most 1"):
        bench.submit([5], 2, guide=SLOW)
    bench.grammars.may_prepare.set()
    bench.run()
    assert bench.conductor.counters.refused["queue"] == 2
    assert bench.outcomes[running].tokens == [5, 5]
    assert all(outcome.finishes == [FinishReason.LENGTH] for outcome in bench.outcomes.values())
    bench.assert_idle()


def test_of_a_tenant_too_nobody_waits_who_is_prepared_for_a_free_row():
    bench = Bench(rows=4, queued_per_tenant=1)
    for _ in range(5):
        bench.submit([5], 2, guide=SLOW, tenant="a")
    with pytest.raises(Unavailable, match=r"^max_queued_requests_per_tenant"):
        bench.submit([5], 2, guide=SLOW, tenant="a")
    bench.grammars.may_prepare.set()
    bench.run()
    bench.assert_idle()
    for _ in range(5):  # nothing of those that left counts
        bench.submit([5], 2, tenant="a")
    bench.run()


def test_a_long_prompt_is_prepared_whatever_may_queue_as_long_as_a_row_is_free():
    bench = Bench(rows=1, queued=1, queued_tokens=10)
    first = bench.submit([5] * 30, 2, guide=QUICK)
    bench.run()
    assert bench.outcomes[first].tokens == [5, 5]
    bench.submit([5], 9)
    with pytest.raises(Unavailable, match="max_queued_tokens: at most 10"):
        bench.submit([5] * 30, 2, guide=QUICK)
    bench.run()


def waiting(request_id: int) -> Waiting:
    request = EngineRequest(prompt_ids=bytes(4), max_tokens=1, temperature=0.0)
    return Waiting(request_id, 0, request_id, request, 1, RequestInfo(request_id, resource_configs={"": request_id}))


def test_few_threads_do_the_work_in_order_and_end_with_it():
    began, gate = [], threading.Semaphore(0)

    def prepare(configs):
        began.append(configs[""])
        assert gate.acquire(timeout=20)

    def num_threads():
        return sum(thread.name == "mstar-prepare" for thread in threading.enumerate())

    wait_for(lambda: num_threads() == 0)
    preparing = Preparing(prepare)
    for request_id in range(6):
        preparing.add(waiting(request_id))
    wait_for(lambda: len(began) == THREADS)
    assert num_threads() == THREADS
    assert preparing.remove(3).request_id == 3  # before its turn: never begun
    for _ in range(5):
        gate.release()
    wait_for(lambda: num_threads() == 0)
    assert sorted(began) == [0, 1, 2, 4, 5]
    assert began[2:] == [2, 4, 5]
    assert sorted(each.waiting.request_id for each in preparing.take()) == [0, 1, 2, 4, 5]
    assert (len(preparing), preparing.num_tokens) == (0, 0)
    preparing.add(waiting(9))  # a new thread
    gate.release()
    wait_for(lambda: 9 in began)
