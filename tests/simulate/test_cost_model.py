"""A cost model finds the parts that made the times, none of them below 0, and says how far it is off."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.simulate.composition import Composition, StepRows, columns
from mstar.simulate.cost_model import PARTS, CostModel, fit
from mstar.simulate.measured import ENOUGH, MeasuredStep, load, shipped
from mstar.utils.errors import LoadError
from tests.simulate.rigs import measured, step_ms


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
    true = CostModel(tuple(part / size for part, size in zip(parts, (1, 10, 50, 3e4, 1, 1e3, 1e5), strict=True)))
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
    model = CostModel((1.0, 0.1, 0.01, 1e-3, 0.5, 1e-2, 1e-5))
    made = steps(30)
    errors = model.errors(columns(made), np.array([model.step_ms(step) for step in made]))
    assert errors.p95 == pytest.approx(0, abs=1e-12)


def test_errors_are_relative_to_what_was_measured():
    made = [Composition(rows, 0, 0, 0, 0) for rows in (1, 2, 3, 4)]
    errors = CostModel((1.0, 0, 0, 0, 0, 0, 0)).errors(columns(made), np.array([1.0, 2.0, 2.0, 2.0]))
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
