"""What a trace that was played is summed up to: latencies, goodput, how full steps were, tenants' shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from mstar.conductor.counters import Counters
from mstar.conductor.request import FinishReason
from mstar.simulate.composition import KINDS
from mstar.simulate.measures import FAILED, REFUSED, UNSEEN, Measures
from mstar.simulate.trace import Trace

SHARES = (0.5, 0.9, 0.99)
LATE_SHARE = 0.01  # of a request's gaps that may be above the bound
MOST_TENANTS = 20  # that are told of one by one


class Slo(msgspec.Struct, frozen=True):
    """A request is in time when its first token comes within ``ttft_ms``, and all but :data:`LATE_SHARE` of the gaps
    between its tokens are at most ``itl_ms``."""

    ttft_ms: float
    itl_ms: float


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds; NaN where there is none."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float


class StepKind(msgspec.Struct, frozen=True):
    """``steps`` of one kind, with means of their rows, tokens and milliseconds."""

    steps: int
    rows: float
    tokens: float
    ms: float


class Tenant(msgspec.Struct, frozen=True):
    """``tokens`` generated for it, and the median time to its first tokens in milliseconds."""

    requests: int
    tokens: int
    ttft_p50: float


class Summary(msgspec.Struct, frozen=True):
    """All of it.

    ``batch_fill``: rows of steps that generate over the most that may run; ``device_share``: of the time that the
    device had a step; ``goodput`` and ``goodput_tokens`` count requests in time and their tokens, per second;
    ``preemptions``: times that a running request gave its pages up, and ran ``recomputed_tokens`` again;
    ``fairness``: Jain's index of the tokens generated for each tenant, 1 when all got as many.
    """

    requests: int
    ended: dict[str, int]
    refused: dict[str, int]
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    ttft: Latency
    itl: Latency
    end_to_end: Latency
    slo: Slo
    in_time: float
    goodput: float
    goodput_tokens: float
    mean_queued: float
    max_queued: int
    mean_running: float
    batch_fill: float
    device_share: float
    steps: dict[str, StepKind]
    refused_admissions: int
    preemptions: int
    recomputed_tokens: int
    discarded_tokens: int
    prompt_tokens: int
    cached_share: float
    fairness: float
    tenants: dict[str, Tenant]

    def as_json(self) -> dict[str, Any]:
        """Plain values, NaN as None."""
        return msgspec.json.decode(msgspec.json.encode(self))


@dataclass(frozen=True)
class Played:
    """A trace that was played to its end: what the conductor counted since its start, the most rows that could run, and
    the nanoseconds in which the device had a step."""

    trace: Trace
    counters: Counters
    max_rows: int
    busy_ns: int


def summarise(played: Played, measures: Measures, slo: Slo) -> Summary:
    """Of a trace that was played, and what was noted of it."""
    trace, counters = played.trace, played.counters
    seconds = max(int(measures.end_ns.max()) - int(measures.arrival_ns.min()), 1) / 1e9
    has_first = measures.first_ns != UNSEEN
    ttft_ms = (measures.first_ns - measures.arrival_ns)[has_first] / 1e6
    served = np.isin(measures.end, (FinishReason.STOP, FinishReason.LENGTH))
    gaps = np.maximum(measures.generated - 1, 0)
    in_time = served & has_first & (measures.late_gaps <= LATE_SHARE * gaps)
    in_time &= measures.first_ns - measures.arrival_ns <= slo.ttft_ms * 1e6
    tokens_of_tenant = np.bincount(trace.tenants, measures.generated, len(trace.tenant_names))
    generating = [kind for kind in measures.steps if kind != "prefill"]
    fill = sum(measures.step_rows[kind] for kind in generating) / max(sum(measures.steps[k] for k in generating), 1)
    return Summary(
        requests=len(trace),
        ended=_ends(measures),
        refused=dict(measures.refusals),
        seconds=seconds,
        requests_per_s=float(served.sum()) / seconds,
        tokens_per_s=float(measures.generated.sum()) / seconds,
        ttft=_latency(ttft_ms),
        itl=_gap_latency(measures),
        end_to_end=_latency((measures.end_ns - measures.arrival_ns)[served] / 1e6),
        slo=slo,
        in_time=float(in_time.mean()),
        goodput=float(in_time.sum()) / seconds,
        goodput_tokens=float(measures.generated[in_time].sum()) / seconds,
        mean_queued=measures.timeline.mean_queued,
        max_queued=measures.timeline.max_queued,
        mean_running=measures.timeline.mean_running,
        batch_fill=fill / played.max_rows,
        device_share=played.busy_ns / 1e9 / seconds,
        steps={kind: _kind(measures, kind) for kind in KINDS if measures.steps[kind]},
        refused_admissions=counters.refused_admissions,
        preemptions=counters.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
        discarded_tokens=counters.discarded_tokens,
        prompt_tokens=counters.prompt_tokens,
        cached_share=measures.cached_tokens / max(counters.prompt_tokens, 1),
        fairness=jain(tokens_of_tenant),
        tenants=_tenants(trace, measures, tokens_of_tenant),
    )


def jain(amounts: np.ndarray) -> float:
    """Jain's index of float64 [n]: 1 when all are equal, 1 / n when one has everything (Jain, Chiu, Hawe 1984)."""
    squares = float((amounts**2).sum()) * amounts.size
    return float(amounts.sum()) ** 2 / squares if squares else 1.0


def _ends(measures: Measures) -> dict[str, int]:
    codes, counts = np.unique(measures.end, return_counts=True)
    names = {FAILED: "failed", REFUSED: "refused"}
    return {
        names.get(code) or FinishReason(code).text: count
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
    }


def _latency(milliseconds: np.ndarray) -> Latency:
    if not milliseconds.size:
        return Latency(*(math.nan,) * 5)
    p50, p90, p99 = np.quantile(milliseconds, SHARES).tolist()
    return Latency(p50, p90, p99, float(milliseconds.mean()), float(milliseconds.max()))


def _gap_latency(measures: Measures) -> Latency:
    gaps, total = measures.gaps, int(measures.gaps.counts.sum())
    if not total:
        return Latency(*(math.nan,) * 5)
    p50, p90, p99 = gaps.quantiles_ms(SHARES)
    return Latency(p50, p90, p99, gaps.sum_ns / 1e6 / total, gaps.max_ns / 1e6)


def _kind(measures: Measures, kind: str) -> StepKind:
    steps = measures.steps[kind]
    rows, tokens, spent = measures.step_rows[kind], measures.step_tokens[kind], measures.step_ns[kind]
    return StepKind(steps, rows / steps, tokens / steps, spent / 1e6 / steps)


def _tenants(trace: Trace, measures: Measures, tokens: np.ndarray) -> dict[str, Tenant]:
    """Those with the most requests."""
    asked = np.bincount(trace.tenants, minlength=tokens.size)
    found = {}
    for tenant in np.argsort(-asked, kind="stable")[:MOST_TENANTS].tolist():
        mine = (trace.tenants == tenant) & (measures.first_ns != UNSEEN)
        waited = (measures.first_ns - measures.arrival_ns)[mine] / 1e6
        median = float(np.median(waited)) if waited.size else math.nan
        found[trace.tenant_names[tenant]] = Tenant(int(asked[tenant]), int(tokens[tenant]), median)
    return found
