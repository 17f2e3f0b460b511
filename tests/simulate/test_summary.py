"""Percentiles, goodput and fairness, against the same from all values."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.simulate.gaps import GapHistogram
from mstar.simulate.report_text import summary_text
from mstar.simulate.summary import Slo, jain, summarise
from mstar.simulate.synthetic import SYNTHETIC, Ask, with_tenants
from mstar.simulate.timeline import MOST_POINTS, Timeline
from mstar.simulate.trace import make_trace
from tests.simulate.rigs import CONTEXT, play


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1_000, 10**11), min_size=1, max_size=40), min_size=1, max_size=20))
def test_percentiles_of_gaps_are_right_to_a_hundredth(chunks):
    histogram = GapHistogram()
    for chunk in chunks:
        histogram.add(np.array(chunk))
    every = np.concatenate(chunks)
    exact = np.quantile(every, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf") / 1e6
    found = histogram.quantiles_ms((0.5, 0.9, 0.99, 1.0))
    assert found == pytest.approx(exact, rel=0.0101)
    assert found[-1] == every.max() / 1e6
    assert histogram.sum_ns == every.sum()


def test_levels_are_weighed_by_how_long_they_hold():
    timeline = Timeline()
    for now, queued, running in [(100, 2, 1), (200, 6, 3), (500, 0, 0)]:
        timeline.add(now, queued, running)
    assert timeline.mean_queued == (100 * 2 + 300 * 6) / 400
    assert timeline.mean_running == (100 * 1 + 300 * 3) / 400
    assert timeline.max_queued == 6


def test_a_long_timeline_keeps_a_bounded_number_of_points_over_all_of_it():
    timeline = Timeline()
    for now in range(50_000):
        timeline.add(now, now % 7, 1)
    points = timeline.points()
    assert MOST_POINTS // 2 < len(points) <= MOST_POINTS
    assert points[-1, 0] > 49_900
    assert np.ptp(np.diff(points[:, 0])) == 0


def test_jains_index():
    assert jain(np.array([5.0, 5.0, 5.0])) == pytest.approx(1)
    assert jain(np.array([9.0, 0.0, 0.0])) == pytest.approx(1 / 3)
    assert jain(np.zeros(4)) == 1


def test_goodput_counts_requests_within_both_bounds():
    trace = make_trace(np.zeros(12), np.full(12, 30), np.full(12, 20))
    rig, measures = play(trace, max_running_requests=4, itl_bound_ms=3.0)
    waited = (measures.first_ns - measures.arrival_ns) / 1e6
    bound = float(np.sort(waited)[6]) + 1e-6
    summary = summarise(rig.played(), measures, Slo(bound, 3.0))
    assert summary.in_time == ((waited <= bound) & (measures.late_gaps == 0)).mean()
    assert 0 < summary.in_time < 1
    assert summary.goodput == pytest.approx(summary.in_time * 12 / summary.seconds)
    assert summarise(rig.played(), measures, Slo(1e9, 3.0)).in_time == (measures.late_gaps == 0).mean()
    assert summary.tokens_per_s == pytest.approx(12 * 20 / summary.seconds)


def test_late_gaps_are_those_above_the_bound():
    trace = make_trace(np.array([0.0, 0.02]), np.array([10, 200]), np.array([40, 2]))  # a prompt comes between
    _, measures = play(trace, "cpu", itl_bound_ms=2.5, chunked_prefill=False)
    assert measures.late_gaps.tolist() == [1, 0]
    _, measures = play(trace, "cpu", itl_bound_ms=1e3)
    assert measures.late_gaps.tolist() == [0, 0]


def test_refusals_are_counted_and_named():
    trace = make_trace(np.zeros(30), np.full(30, 30), np.full(30, 20))
    rig, measures = play(trace, max_running_requests=4, max_queued_requests=5)
    summary = summarise(rig.played(), measures, Slo(1e3, 1e3))
    assert summary.ended == {"length": 9, "refused": 21}
    assert summary.refused == {"UNAVAILABLE: max_queued_requests": 21}
    assert summary.max_queued == 5


def test_text_and_json_tell_of_every_tenant():
    ask = Ask(requests=80, rate=400.0, prompt_tokens=40, output_tokens=20, context=CONTEXT)
    rig, measures = play(with_tenants(SYNTHETIC["poisson"](ask), 3))
    summary = summarise(rig.played(), measures, Slo(100.0, 10.0))
    text = summary_text(summary)
    told = json.loads(json.dumps(summary.as_json()))
    for name in ("tenant 1", "tenant 2", "tenant 3"):
        assert name in text
        assert told["tenants"][name]["tokens"] > 0
    assert sum(each["tokens"] for each in told["tenants"].values()) == measures.generated.sum()
    assert 1 / 3 < told["fairness"] < 1
    assert 0 < told["batch_fill"] <= 1
    assert 0 < told["device_share"] <= 1
