"""Runs a workload through an engine in this process as the engine's own loop does, and notes when what came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from mstar.cli.bench.workloads import Workload
from mstar.conductor.report import StepReport
from mstar.engine.phase_clock import NO_CLOCK, PhaseClock
from mstar.runtime.core import MESSAGES_PER_STEP, EngineCore
from mstar.runtime.messages import encode
from mstar.runtime.outgoing import by_client

MESSAGE = "message"  # the phase of the clock that ends an iteration of the loop


@dataclass(frozen=True)
class Run:
    """One workload from submission to its last token; times are in seconds.

    ``seconds`` and ``first_seconds``: until the last token, and until each row had its first.  ``iterations`` [n]: each
    turn of the loop, from one report to the next, and ``brought`` int64 [n] the tokens in it; those of ``steady``
    brought further tokens of every row.
    """

    seconds: float
    first_seconds: float
    iterations: np.ndarray
    brought: np.ndarray
    steady: slice
    tokens: list[np.ndarray]  # int32 [output_len] of each row

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def step_seconds(self) -> float:
        """Median of the steady iterations, per token of a row; NaN where there are none."""
        steady, brought = self.iterations[self.steady], self.brought[self.steady]
        return float(np.median(steady * len(self.tokens) / brought)) if steady.size else float("nan")


@torch.inference_mode()  # as the engine's own loop runs
def run_workload(
    core: EngineCore,
    workload: Workload,
    clock: PhaseClock = NO_CLOCK,
    on_iteration: Callable[[int], None] = lambda iteration: None,
) -> Run:
    """Submits everything as it would come from front ends, and steps until all is done; each report becomes the
    messages that they would get.

    Args:
        clock: told after each iteration, as phase :data:`MESSAGE`.
        on_iteration: called before each iteration with its number.
    """
    requests = enumerate(workload.requests())
    reports: list[StepReport] = []
    times = [time.perf_counter()]
    while True:
        for row, request in islice(requests, MESSAGES_PER_STEP):
            core.submit(request, ticket=row)
        if not core.has_work():
            break
        on_iteration(len(reports))
        report = core.step()
        for _, _, message in by_client(report):
            encode(message)
        clock.mark(MESSAGE)
        times.append(time.perf_counter())
        reports.append(report)
    return _sort_out(workload, reports, np.array(times))


def _sort_out(workload: Workload, reports: list[StepReport], times: np.ndarray) -> Run:
    rows = workload.rows
    failure = next((failure for report in reports for failure in report.failures), None)
    assert failure is None, failure
    tickets = np.concatenate([report.tickets for report in reports])
    tokens = np.concatenate([report.tokens for report in reports])
    brought = np.array([report.tickets.size for report in reports])
    came_in = np.repeat(np.arange(len(reports)), brought)
    order = np.argsort(tickets, kind="stable")
    counts = np.bincount(tickets, minlength=rows)
    assert (counts == workload.output_lens).all(), "a row ended early"
    starts = np.cumsum(counts) - counts
    first, last = came_in[order[starts]].max(), came_in[order[starts + counts - 1]].min()
    return Run(
        seconds=float(times[-1] - times[0]),
        first_seconds=float(times[first + 1] - times[0]),
        iterations=np.diff(times),
        brought=brought,
        steady=slice(int(first) + 1, int(last) + 1),
        tokens=np.split(tokens[order], starts[1:]),
    )
