"""``mstar bench``: what it counts, and what it refuses."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mstar.cli.bench.serve import PERCENTILES, Trace, summarise
from mstar.cli.main import app


@pytest.mark.parametrize("command", [["offline", "--batch-sizes", "1,x"], ["serve", "--concurrency", "0"]])
def test_a_list_that_holds_no_counts_is_refused_by_option(command: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *command])
    assert result.exit_code == 2
    assert command[1] in result.output


def test_a_level_counts_tokens_of_joined_responses_and_leaves_errors_out() -> None:
    traces = [
        Trace(sent=0.0, arrivals=[1.0, 2.0, 4.0], tokens=[1, 1, 4], finished=4.0),
        Trace(sent=1.0, arrivals=[2.0], tokens=[6], finished=2.5),
        Trace(sent=0.0, error="refused", finished=1.0),
    ]
    level = summarise(2, traces, seconds=5.0)
    assert (level.requests, level.errors) == (3, 1)
    assert (level.requests_per_s, level.output_tokens_per_s, level.tokens_per_response) == (0.4, 2.4, 3.0)
    assert PERCENTILES == (50, 90, 99)
    assert level.ttft_ms[0] == pytest.approx(1000.0)
    assert level.itl_ms == pytest.approx((600.0,) * 3)  # three seconds for five tokens after the first
    assert level.e2e_ms[0] == pytest.approx(2750.0)
