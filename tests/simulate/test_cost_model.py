"""A cost model finds the parts that made the times, none of them below 0, and says how far it is off."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from mstar.simulate.buckets import UNPADDED, Buckets
from mstar.simulate.composition import Composition, StepRows, columns
from mstar.simulate.cost_model import PARTS, CostModel, fit
from mstar.simulate.host_costs import HostCosts, HostStep, fit_host
from mstar.simulate.measured import ENOUGH, LoopTurn, MeasuredStep, MeasuredSteps, load, shipped
from mstar.simulate.non_negative import non_negative
from mstar.utils.errors import LoadError
from tests.simulate.rigs import measured, step_ms

BUCKETS = Buckets((1, 2, 4, 8, 32), (4, 16), (64, 512, 768))
SIZES = (1, 1, 10, 50, 200, 500, 50, 3e4, 300, 1, 1e3, 1e5)  # how large each part is in these steps


def steps(count: int, seed: int = 0) -> list[Composition]:
    rng = np.random.default_rng(seed)
    made = []
    for kind in itertools.islice(itertools.cycle(("decode", "prefill", "mixed")), count):
        rows = 0 if kind == "prefill" else int(rng.integers(1, 64))
        prompts = 0 if kind == "decode" else int(rng.integers(1, 4))
        spans = rng.integers(1, 500, prompts)
        pairs = int((spans * (spans + 1) // 2).sum())
        made.append(Composition(rows, rows * int(rng.integers(1, 900)), prompts, int(spans.sum()), pairs))
    return made


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=len(PARTS), max_size=len(PARTS)), st.integers(0, 5))
def test_the_parts_that_made_the_times_are_found(parts, seed):
    parts[0] += 0.1
    true = CostModel(tuple(part / size for part, size in zip(parts, SIZES, strict=True)))
    made = steps(120, seed)
    times = np.array([true.step_ms(step) for step in made])
    found = fit(columns(made), times)
    assert min(found.parts_ms) >= 0
    assert [found.step_ms(step) for step in made] == pytest.approx(times, rel=1e-4)
    assert found.errors(columns(made), times).p95 < 1e-4


def test_no_part_is_negative_where_plain_least_squares_would_have_one():
    made = [Composition(rows, 10 * rows, 0, 0, 0) for rows in (20, 40, 80)]
    found = fit(columns(made), np.array([1.0, 3.0, 7.0]))  # a line through -1
    assert min(found.parts_ms) >= 0


def test_single_slow_steps_move_nothing():
    made = steps(200)
    times = np.array([step_ms(step) for step in made])
    slowed = times.copy()
    slowed[::20] *= 5
    found = fit(columns(made), slowed)
    assert found.errors(columns(made), times).p95 < 0.05


def test_a_prediction_is_the_sum_that_was_fitted():
    model = CostModel((1.0, 0.1, 0.2, 0.1, 0.02, 0.03, 0.01, 1e-3, 2e-3, 0.5, 1e-2, 1e-5), BUCKETS)
    made = steps(30)
    errors = model.errors(columns(made), np.array([model.step_ms(step) for step in made]))
    assert errors.p95 == pytest.approx(0, abs=1e-12)


def test_errors_are_relative_to_what_was_measured():
    made = [Composition(rows, 0, 0, 0, 0) for rows in (1, 2, 3, 4)]
    errors = CostModel((1.0, *[0.0] * (len(PARTS) - 1))).errors(columns(made), np.array([1.0, 2.0, 2.0, 2.0]))
    assert (errors.steps, errors.median, errors.bias) == (4, 0.5, -0.375)


def test_pairs_of_a_prompts_part_count_what_is_stored_before_it():
    step = StepRows(np.array([1, 3, 4]), np.array([9, 0, 10]), num_prompts=2).compose()
    assert step == Composition(1, 10, 2, 7, (1 + 2 + 3) + (11 + 12 + 13 + 14))
    assert step.kind == "mixed"


def test_a_file_of_steps_is_read_as_it_was_written(tmp_path):
    written = measured()
    written.save(tmp_path / "steps.json")
    assert load(str(tmp_path / "steps.json")) == written
    errors = written.errors()
    assert list(errors) == ["all", "decode", "prefill", "mixed", "held out"]
    assert errors["all"].steps == len(written.steps) >= ENOUGH
    assert errors["held out"].p95 < 0.01


@pytest.mark.parametrize("name", shipped())
def test_shipped_steps_fit(name):
    found = load(name)
    assert found.errors()["all"].median < 0.15
    one, many = (found.cost_model().step_ms(Composition(rows, rows * 100, 0, 0, 0)) for rows in (1, 32))
    assert 0 < one < many < 32 * one


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no file of measured steps"),
        ('{"source": 1}', "no file of measured steps"),
        (None, "No such file"),
        ("no steps", "no steps"),
        ("no time", "took no time"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, told):
    file = tmp_path / "steps.json"
    if text in ("no steps", "no time"):
        made = measured()
        made.steps[:] = [] if text == "no steps" else [MeasuredStep(1, 1, 0, 0, 0, 0.0)]
        made.save(file)
    elif text is not None:
        file.write_text(text)
    with pytest.raises(LoadError, match=told) as raised:
        load(str(file))
    assert str(file) in str(raised.value)


def test_an_unknown_name_tells_which_are_shipped():
    with pytest.raises(LoadError, match=r"h200-qwen3-0\.6b"):
        load("h100")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 30))
def test_least_squares_without_negative_parts_cannot_be_improved(seed, parts, rows):
    rng = np.random.default_rng(seed)
    made, target = rng.uniform(0, 1, (rows, parts)), rng.normal(0.5, 1, rows)
    found = non_negative(made, target)
    assert found.min() >= 0
    gain = made.T @ (target - made @ found)  # by Karush, Kuhn and Tucker
    assert gain.max() < 1e-8
    assert np.abs(gain[found > 0]).max(initial=0) < 1e-8


def test_a_step_takes_the_time_of_its_bucket():
    model = CostModel((1.0, *[0.01] * (len(PARTS) - 1)), BUCKETS)
    of = [model.step_ms(Composition(rows, 100, 0, 0, 0)) for rows in (5, 8)]
    assert of[0] == pytest.approx(of[1] + 0.01 * (100 / 5 - 100 / 8)), "but for how long its rows are"
    assert BUCKETS.pad(Composition(9, 0, 0, 0, 0)) == (32, 32)
    assert BUCKETS.pad(Composition(33, 0, 0, 0, 0)) == (33, 33), "larger than any is not padded"
    assert BUCKETS.pad(Composition(3, 0, 2, 62, 0)) == (16, 512)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([BUCKETS, UNPADDED]))
def test_many_are_padded_as_each_is(seed, buckets):
    made = steps(40, seed)
    rows, tokens = buckets.pad_all(columns(made))
    assert list(zip(rows.tolist(), tokens.tolist(), strict=True)) == [buckets.pad(step) for step in made]


def test_what_the_host_spends_is_found_apart_for_changed_steps():
    true = HostCosts(50.0, 0.5, 40.0, 200.0, 2.0, 90.0, 60.0, 7.0)
    made = [HostStep(rows, prompts, uses) for rows in (1, 8, 40) for prompts in (0, 1, 5) for uses in (0, 1, 2, 9)]
    found = fit_host(made, np.array([true.of(step) for step in made]), 40.0)
    assert astuple(found) == pytest.approx(astuple(true), abs=0.01)
    assert true.of(HostStep(10, 2, 0)) == 50 + 5 + 200 + 20 + 60 + 14


@pytest.mark.parametrize(("runs_ahead", "ms"), [(True, [3.0, 2.0]), (False, [4.0, 3.0])])
def test_a_turn_takes_the_longer_of_both_parts_where_they_overlap(runs_ahead, ms):
    model = CostModel((1.0, *[0.0] * (len(PARTS) - 1)))
    host = HostCosts(0.0, 0.0, 500.0, 2000.0)
    given = MeasuredSteps("", "cuda", 1, 1, 1, host, [], runs_ahead=runs_ahead)
    turns = [LoopTurn(Composition(1, 1, 0, 0, 0), HostStep(1, 0, 0), submitted, 0.0, 0.0) for submitted in (2, 0)]
    assert [given.turn_ms(model, turn) for turn in turns] == ms
