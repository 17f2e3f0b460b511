"""Phases follow each other without gaps, so they add up to the time of the loop that marks them."""

import time

from mstar.engine.accelerator_graph_backend import CpuGraphBackend
from mstar.engine.batch import Batch
from mstar.engine.phase_clock import NO_CLOCK, PHASES, PhaseClock

from .toy import make_engine, request


def test_the_phases_add_up_to_the_time_since_the_start():
    clock = PhaseClock()
    clock.start()
    began = time.perf_counter()
    for name in ("a", "b", "a"):
        time.sleep(0.002)
        clock.mark(name)
    wall = time.perf_counter() - began
    assert list(clock.seconds) == ["a", "b"]
    assert clock.marks == {"a": 2, "b": 1}
    assert clock.seconds["a"] > clock.seconds["b"] >= 0.002
    assert abs(sum(clock.seconds.values()) - wall) < 0.05 * wall


def test_time_before_the_start_belongs_to_no_phase():
    clock = PhaseClock()
    time.sleep(0.01)
    clock.start()
    clock.mark("a")
    assert clock.seconds["a"] < 0.005
    time.sleep(0.01)
    clock.reset()
    assert not clock.seconds
    clock.mark("b")
    assert clock.seconds["b"] < 0.005


def test_the_clock_that_is_off_keeps_nothing():
    NO_CLOCK.start()
    NO_CLOCK.mark("a")
    assert not NO_CLOCK.seconds


def test_a_captured_step_passes_through_every_phase_once_and_collecting_is_a_second_part_of_the_last():
    clock = PhaseClock()
    engine, _, _ = make_engine(backend=CpuGraphBackend(), clock=clock)
    info = request(0)
    engine.ingest(info)
    engine.exec(Batch("LLM", "prefill", [info]))
    clock.reset()
    engine.exec(Batch("LLM", "decode", [info]))
    assert clock.marks == dict.fromkeys(PHASES, 1) | {"collect": 2}
    assert list(clock.seconds) == list(PHASES)
