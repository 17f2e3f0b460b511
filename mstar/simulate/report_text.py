"""A summary as a table for people."""

from __future__ import annotations

import msgspec

from mstar.simulate.cost_model import PARTS, CostModel, FitError
from mstar.simulate.host_costs import HostCosts
from mstar.simulate.summary import Latency, Summary


def summary_text(summary: Summary) -> str:
    """Lines of a name and its values."""
    lines = [
        ("requests", f"{summary.requests:,} in {summary.seconds:,.1f} s: {_counts(summary.ended)}"),
        ("served", f"{summary.requests_per_s:,.2f} requests/s, {summary.tokens_per_s:,.0f} tokens/s"),
        ("first token, ms", _latency(summary.ttft)),
        ("between tokens, ms", _latency(summary.itl)),
        ("whole request, ms", _latency(summary.end_to_end)),
        (
            "in time",
            f"{summary.in_time:.1%} (first token within {summary.slo.ttft_ms:g} ms, 99% of the gaps within "
            f"{summary.slo.itl_ms:g} ms)",
        ),
        ("goodput", f"{summary.goodput:,.2f} requests/s, {summary.goodput_tokens:,.0f} tokens/s"),
        ("waiting", f"{summary.mean_queued:,.1f} on average, {summary.max_queued:,} at most"),
        ("running", f"{summary.mean_running:,.1f} on average, steps {summary.batch_fill:.0%} full"),
        ("device", f"{summary.device_share:.0%} of the time with a step"),
    ]
    for kind, steps in summary.steps.items():
        text = f"{steps.steps:,}, mean {steps.rows:.1f} rows, {steps.tokens:.1f} tokens, {steps.ms:.3f} ms"
        lines.append((f"{kind} steps", text))
    lines.append(
        ("prompt tokens", f"{summary.prompt_tokens:,}, {summary.cached_share:.1%} of them from the prefix cache")
    )
    short = f"{summary.refused_admissions:,} steps, {summary.preemptions:,} requests gave up theirs"
    lines.append(("short of pages", f"{short}, {summary.recomputed_tokens:,} tokens recomputed"))
    lines.append(("dropped", f"{summary.discarded_tokens:,} tokens of steps launched before their request ended"))
    if summary.refused:
        lines.append(("refused", _counts(summary.refused)))
    if len(summary.tenants) > 1:
        lines.append(("fairness", f"{summary.fairness:.3f} (Jain's index of generated tokens by tenant)"))
        for name, tenant in summary.tenants.items():
            text = f"{tenant.requests:,} requests, {tenant.tokens:,} tokens, first token p50 {tenant.ttft_p50:,.1f} ms"
            lines.append((f"  {name}", text))
    return _columns(lines)


def errors_text(errors: dict[str, FitError]) -> str:
    """Errors of a fit, by group of steps."""
    return _columns(
        [
            (f"  {name}", f"median {e.median:.1%}, p95 {e.p95:.1%}, bias {e.bias:+.1%} over {e.steps:,} steps")
            for name, e in errors.items()
        ]
    )


def costs_text(model: CostModel, host: HostCosts) -> str:
    """What a step's parts cost on the device, but for those that cost nothing, and on the host."""
    device = ", ".join(f"{name} {1e3 * ms:.4g}" for name, ms in zip(PARTS, model.parts_ms, strict=True) if ms)
    on_host = ", ".join(f"{name.removesuffix('_us')} {us:.4g}" for name, us in msgspec.structs.asdict(host).items())
    return _columns([("device, µs", device), ("host, µs", on_host)])


def _latency(latency: Latency) -> str:
    return (
        f"p50 {latency.p50:,.1f}, p90 {latency.p90:,.1f}, p99 {latency.p99:,.1f}, "
        f"mean {latency.mean:,.1f}, max {latency.max:,.1f}"
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _columns(lines: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)
