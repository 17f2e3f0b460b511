"""What is noted of a trace that is played: times by request, counts by step, how long the queue was."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mstar.conductor.report import StepReport
from mstar.conductor.request import FinishReason
from mstar.simulate.composition import Composition, StepSize
from mstar.simulate.gaps import GapHistogram
from mstar.simulate.timeline import Timeline
from mstar.simulate.trace import Trace
from mstar.utils.errors import MstarError

RUNNING, FAILED, REFUSED = FinishReason.RUNNING, 100, 101  # besides the other finish reasons: how a request stands
UNSEEN = -1


class Measures:
    """By ticket [requests]: ``arrival_ns``, ``first_ns`` of the first token and ``end_ns`` (:data:`UNSEEN` before),
    ``generated`` tokens, ``late_gaps``: those between two tokens that were longer than ``itl_bound_ns``, ``end``: how
    it ended, once.

    Gaps of all requests are in ``gaps``; ``steps``, ``step_rows``, ``step_tokens`` and ``step_ns`` count by kind.
    """

    def __init__(self, trace: Trace, itl_bound_ns: int) -> None:
        count = len(trace)
        self.itl_bound_ns = itl_bound_ns
        self.arrival_ns = np.full(count, UNSEEN, np.int64)
        self.first_ns = np.full(count, UNSEEN, np.int64)
        self.end_ns = np.full(count, UNSEEN, np.int64)
        self.generated = np.zeros(count, np.int64)
        self.late_gaps = np.zeros(count, np.int64)
        self.end = np.full(count, RUNNING, np.int64)
        self.gaps = GapHistogram()
        self.refusals: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.step_rows: Counter[str] = Counter()
        self.step_tokens: Counter[str] = Counter()
        self.step_ns: Counter[str] = Counter()
        self.cached_tokens = 0
        self.timeline = Timeline()
        self._last_ns = np.zeros(count, np.int64)

    def on_arrival(self, ticket: int, arrived_ns: int) -> None:
        assert self.arrival_ns[ticket] == UNSEEN, "a request came twice"
        self.arrival_ns[ticket] = arrived_ns

    def on_refusal(self, ticket: int, error: MstarError, now_ns: int) -> None:
        """A request was not taken; it is over."""
        self._ends(np.array([ticket]), REFUSED, now_ns)
        self.refusals[f"{error.code}: {str(error).split(':')[0]}"] += 1

    def on_step(self, step: Composition | StepSize, nanoseconds: int) -> None:
        """A step was run that takes so long."""
        kind = step.kind
        self.steps[kind] += 1
        self.step_rows[kind] += step.decode_rows + step.prompt_rows
        self.step_tokens[kind] += step.decode_rows + step.prompt_tokens
        self.step_ns[kind] += nanoseconds

    def on_report(self, report: StepReport, now_ns: int, num_queued: int, num_running: int) -> None:
        """What a call of the conductor told, at the time it told it."""
        self.timeline.add(now_ns, num_queued, num_running)
        self.cached_tokens += report.cached_prompt_tokens
        if report.tokens.size:
            brings = report.tokens >= 0
            self._take_tokens(report.tickets if brings.all() else report.tickets[brings], now_ns)
            has_ended = report.finish.nonzero()[0]
            if has_ended.size:
                self._ends(report.tickets[has_ended], report.finish[has_ended], now_ns)
        for failure in report.failures:
            self._ends(np.array([failure.ticket]), FAILED, now_ns)

    def on_stop(self, tickets: np.ndarray, now_ns: int) -> None:
        """Those who asked have read enough of ``tickets``, int64 [n]: nothing more is told of them."""
        self._ends(tickets, FinishReason.STOP, now_ns)

    def ends_of(self, report: StepReport) -> list[int]:
        """Tickets that a report ends."""
        return [*report.tickets[report.finish > 0].tolist(), *(failure.ticket for failure in report.failures)]

    def _take_tokens(self, tickets: np.ndarray, now_ns: int) -> None:
        """One token of each of ``tickets``, which are distinct."""
        self.generated[tickets] += 1
        is_first = self.first_ns[tickets] == UNSEEN
        if is_first.any():
            self.first_ns[tickets[is_first]] = now_ns
            later = tickets[~is_first]
        else:
            later = tickets
        if later.size:
            gaps = now_ns - self._last_ns[later]
            assert gaps.min() >= 0, "time went back"
            self.gaps.add(gaps)
            self.late_gaps[later] += gaps > self.itl_bound_ns
        self._last_ns[tickets] = now_ns

    def _ends(self, tickets: np.ndarray, how: np.ndarray | int, now_ns: int) -> None:
        assert (self.end[tickets] == RUNNING).all(), "a request ended twice"
        self.end[tickets] = how
        self.end_ns[tickets] = now_ns
