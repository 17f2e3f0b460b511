"""A survey of a real engine: its steps are those that ran, timed by the device's events where there are any, and of its
loop it tells what the host did."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from mstar.engine.in_flight import InFlight
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions
from mstar.simulate.loop_turns import SIZES, TURNS
from mstar.simulate.measured import load
from mstar.simulate.recording import RecordingEngine
from mstar.simulate.replay_events import ReplayEvents
from mstar.simulate.rig import buckets_of
from mstar.simulate.survey import CONTEXTS, groups, survey
from tests.runtime.tiny import write_checkpoint

ROWS, CONTEXT, STEP_TOKENS = 4, 512, 64


class HostEvent:
    """What a CUDA event tells, by the host's clock."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        assert self.seconds

    def elapsed_time(self, later: HostEvent) -> float:
        return (later.seconds - self.seconds) * 1e3


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> EngineOptions:
    return EngineOptions(
        model=str(write_checkpoint(tmp_path_factory.mktemp("tiny"))),
        device="cpu",
        num_threads=1,
        max_seq_len=CONTEXT,
        max_running_requests=ROWS,
        max_batch_tokens=STEP_TOKENS,
        prefix_cache=False,
        run_ahead="off",
    )


@pytest.mark.parametrize("has_events", [False, True])
def test_steps_and_turns_of_an_engine_are_measured(options, tmp_path, has_events):
    events = ReplayEvents(HostEvent) if has_events else None
    found = survey(EngineCore(options, events), most_tokens=256, repeats=1, events=events)
    found.save(tmp_path / "steps.json")
    assert load(str(tmp_path / "steps.json")).steps == [step._replace(ms=round(step.ms, 4)) for step in found.steps]
    asked = [group.rows * group.prompt_tokens for group in groups(ROWS, CONTEXT, 256)]
    assert 0.5 * sum(asked) < sum(step.prompt_tokens for step in found.steps) < 1.5 * sum(asked)
    assert {step.composition.kind for step in found.steps} == {"decode", "prefill", "mixed"}
    assert max(step.prompt_tokens for step in found.steps) == STEP_TOKENS
    assert min(step.ms for step in found.steps) > 0
    assert found.buckets == buckets_of(options, torch.device("cpu"), CONTEXT)
    assert found.runs_ahead is has_events
    sizes = [size for size in SIZES if size < ROWS] + [ROWS]
    assert 0.9 * TURNS * len(sizes) < len(found.turns) <= TURNS * len(sizes)
    assert {turn.launched.uses for turn in found.turns} >= {0, 1, 2}
    assert max(turn.launched.rows for turn in found.turns) == ROWS
    assert min(turn.submitted for turn in found.turns) == 0 < max(turn.submitted for turn in found.turns)
    for turn in found.turns:
        assert 0 < turn.host_us < turn.ms * 1e3
    errors = found.errors()
    assert errors["whole"].steps == errors["host"].steps == len(found.turns)
    assert found.host.request_us > 0 < found.host.step_us


def test_an_engine_that_runs_ahead_is_not_measured(options):
    ahead = EngineCore(
        EngineOptions(**{each: getattr(options, each) for each in options.__struct_fields__} | {"run_ahead": "on"})
    )
    with pytest.raises(ValueError, match="run_ahead=off"):
        survey(ahead)


def test_groups_stay_within_rows_context_and_tokens():
    found = list(groups(6, 400, 1024))
    assert {group.rows for group in found} == {1, 2, 4, 6}
    assert {group.prompt_tokens for group in found} == set(CONTEXTS[:2])
    assert all(group.rows * group.prompt_tokens <= 1024 for group in found if not group.stagger)
    assert any(group.stagger for group in found)


def test_events_are_told_apart_by_step():
    now = [0.0]

    class Event:
        def record(self) -> None:
            self.ms = now[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return later.ms - self.ms

    events = ReplayEvents(Event)
    events.begin_step()
    events.mark("replay")  # it is off
    events.is_on = True
    for phases in ([("stage", 1), ("replay", 4)], [("preprocess", 5), ("stage", 7), ("replay", 10)], []):
        events.begin_step()
        for name, ms in phases:
            now[0] = ms
            events.mark(name)
    events.begin_step()  # rows one by one
    for name, ms in (("preprocess", 11), ("replay", 12), ("commit", 13), ("preprocess", 14), ("replay", 18)):
        now[0] = ms
        events.mark(name)
    taken, gaps = events.take()
    assert taken.tolist() == [3, 3, 1 + 4]
    assert gaps.tolist() == [3, 1]
    assert events.take()[0].size == 0


def test_uses_count_steps_in_a_row_of_one_batch():
    class Engine:
        resources = {"kv_cache": type("Kv", (), {"stored_len": np.zeros(4, np.int64)})()}

        def launch(self, batch):
            return InFlight(batch, batch.request_ids)

        def collect(self, in_flight):
            return in_flight

    class Batch:
        row_walks, graph_walk, request_ids, infos = None, "decode", (1,), (type("Info", (), {"row": 1})(),)

    recorder, one, other = RecordingEngine(Engine()), Batch(), Batch()
    in_flight = [recorder.launch(batch) for batch in (one, one, one, other, one, one)]
    assert recorder.uses == [0, 1, 2, 0, 0, 1]
    for place in (0, 1):
        recorder.collect(in_flight[place])
    assert recorder.landed == [0, 1]
    assert all(recorder.wait_ms[place] <= recorder.step_ms[place] for place in (0, 1))
    assert recorder.host_step(2) == (1, 0, 2)
