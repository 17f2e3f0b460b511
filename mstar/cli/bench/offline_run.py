"""``mstar bench offline`` without its command line: what is asked, what is measured in which order, what is told."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from mstar.cli.bench.device_timeline import DeviceTimeline
from mstar.cli.bench.floor import memory_bandwidth
from mstar.cli.bench.kernel_profile import LEAST_TOKENS, KernelProfile, profile_decode
from mstar.cli.bench.measure import BatchResult, Bench, FirstTokenResult, Peer, W3Result
from mstar.cli.bench.peer import PEERS
from mstar.cli.bench.text_table import text_table
from mstar.cli.bench.workloads import W3_HIGH, W3_REQUESTS, Sampling, equal_rows, w3
from mstar.model.checkpoint import open_checkpoint
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions, parse_options

BATCH, W3 = "batch", "w3"
WORKLOADS = (BATCH, W3)
STEP_TOKENS = 8192  # prompt tokens of one step on a GPU, where it is captured; a CPU takes a whole batch's in one
TOP_KERNELS = 20
W3_REPEATS = 3


@dataclass(frozen=True)
class OfflineSettings:
    """What a run measures.

    ``options`` are engine options by name, which win over what follows from the rest.  ``samplings``: each batch size
    is measured with each.  ``first_token_lens``: prompt tokens of the single prompts whose first token is timed.
    ``compare``: names of :data:`~mstar.cli.bench.peer.PEERS`.  ``trace``: file for the profiler's trace of the largest
    batch's decode steps.  ``profiles``: count kernels (only on a GPU).
    """

    model: str = "smollm2-135m"
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    input_len: int = 64
    output_len: int = 64
    workloads: tuple[str, ...] = (BATCH,)
    samplings: tuple[Sampling, ...] = (Sampling(),)
    first_token_lens: tuple[int, ...] = ()
    repeats: int = 3
    seed: int = 0
    compare: tuple[str, ...] = ()
    profiles: bool = True
    trace: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def engine_options(self) -> EngineOptions:
        """LoadError as :func:`~mstar.runtime.options.parse_options`."""
        rows, tokens = list(self.batch_sizes), [self.input_len + self.output_len]
        if W3 in self.workloads:
            rows, tokens = [*rows, W3_REQUESTS], [*tokens, 2 * W3_HIGH]
        tokens += self.first_token_lens
        wanted = {
            "model": self.model,
            "max_seq_len": max(tokens) + 1,
            "max_running_requests": max(rows),
            "prefix_cache": False,  # every run has the same prompts
        }
        on_cpu = self.options.get("device", "auto") == "cpu" or not torch.cuda.is_available()
        whole = max(self.batch_sizes) * self.input_len
        longest = max([self.input_len, *self.first_token_lens, W3_HIGH if W3 in self.workloads else 1])
        wanted["max_batch_tokens"] = max(whole if on_cpu else min(whole, STEP_TOKENS), longest)
        return parse_options(wanted | dict(self.options))[0]


@dataclass
class OfflineRecord:
    """All that one run found out; ``engine`` and ``machine`` say on what."""

    engine: dict[str, Any]
    machine: dict[str, Any]
    input_len: int
    output_len: int
    repeats: int
    bandwidth_gb_s: float
    results: list[BatchResult] = field(default_factory=list)
    w3: W3Result | None = None
    first_tokens: list[FirstTokenResult] = field(default_factory=list)
    kernels: dict[int, KernelProfile] = field(default_factory=dict)  # by rows
    eager_steps: dict[str, int] = field(default_factory=dict)  # by "node/walk: reason"

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def text(self) -> str:
        """As tables."""
        parts = [_batch_table(self)] if self.results else []
        if self.w3 is not None:
            parts.append(_w3_text(self.w3))
        parts += [_first_token_text(each) for each in self.first_tokens]
        parts += [f"steps run eager: {name}: {count}" for name, count in self.eager_steps.items()]
        return "\n".join(parts)

    def kernels_text(self) -> str:
        """The kernels of the largest batch's decode step, as a table."""
        if not self.kernels:
            return "no kernels were profiled"
        rows = max(self.kernels)
        profile = self.kernels[rows]
        uses = sorted((*profile.kernels, *profile.copies), key=lambda use: -use.us_per_step)[:TOP_KERNELS]
        title = (
            f"{rows} rows: {profile.kernels_per_step:.0f} kernels and {profile.copies_per_step:.0f} copies per step, "
            f"{profile.busy_us:.0f} µs in them"
        )
        cells = [(f"{use.us_per_step:.1f}", f"{use.per_step:.1f}", use.name[:90]) for use in uses]
        return text_table(title, ("µs/step", "per step", "kernel"), cells)


def load_bench(settings: OfflineSettings) -> Bench:
    """Loads the engine that ``settings`` need.  LoadError as the engine."""
    options = settings.engine_options()
    timeline = DeviceTimeline()
    core = EngineCore(options, timeline)
    device = torch.device(core.info.device)
    return Bench(core, memory_bandwidth(device), timeline if device.type == "cuda" else None)


def run_offline(settings: OfflineSettings, bench: Bench | None = None) -> OfflineRecord:
    """Measures everything; ``bench`` takes an engine that is loaded already.

    Times come first and profiles last, for torch's profiler slows down what comes after it.

    Raises:
        MstarError: the engine cannot be loaded, or a peer is not installed.
    """
    bench = bench or load_bench(settings)
    core = bench.core
    record = OfflineRecord(
        engine=msgspec.structs.asdict(core.info) | {"options": msgspec.structs.asdict(core.options)},
        machine=_machine(bench.device),
        input_len=settings.input_len,
        output_len=settings.output_len,
        repeats=settings.repeats,
        bandwidth_gb_s=bench.bandwidth / 1e9,
    )
    peers = _open_peers(settings, core, bench.device)
    if BATCH in settings.workloads:
        for rows in settings.batch_sizes:
            for sampling in settings.samplings:
                result = bench.batch(
                    rows,
                    settings.input_len,
                    settings.output_len,
                    repeats=settings.repeats,
                    seed=settings.seed,
                    sampling=sampling,
                    peers=peers,
                )
                record.results.append(result)
    record.first_tokens = [bench.first_token(length) for length in settings.first_token_lens]
    if W3 in settings.workloads:
        record.w3 = bench.w3(w3(core.model.vocab_size), min(settings.repeats, W3_REPEATS))
    if settings.profiles and bench.device.type == "cuda" and settings.output_len >= LEAST_TOKENS:
        largest = max(settings.batch_sizes)
        for rows in settings.batch_sizes:
            workload = equal_rows(rows, settings.input_len, settings.output_len, core.model.vocab_size, settings.seed)
            trace = settings.trace if rows == largest else None
            record.kernels[rows] = profile_decode(core, workload, trace)
    record.eager_steps = {
        f"{node}/{walk}: {reason}": count for (node, walk, reason), count in core.engine.eager_steps.items()
    }
    return record


def _open_peers(settings: OfflineSettings, core: EngineCore, device: torch.device) -> tuple[Peer, ...]:
    if not settings.compare:
        return ()
    checkpoint, load_format = open_checkpoint(settings.model), core.options.load_format
    return tuple(PEERS[name](checkpoint, core.model.dtype, device, load_format) for name in settings.compare)


def _machine(device: torch.device) -> dict[str, Any]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def _batch_table(record: OfflineRecord) -> str:
    engine, results = record.engine, record.results
    title = (
        f"{engine['model']}, {engine['dtype']} on {record.machine.get('gpu', engine['device'])}, "
        f"{record.machine['threads']} threads: {record.input_len} tokens in, {record.output_len} out; "
        f"floor = bytes that must move at {record.bandwidth_gb_s:.1f} GB/s"
    )
    has_events = any(result.event_step_ms is not None for result in results)
    headings = ["rows", "sampling", "tok/s", "of step", "ms/step", "floor ms", "% of floor", "GB/s", "prefill ms"]
    headings += ["event ms/step", "replay ms", "gap µs", "kernels"] if has_events else []
    headings += ["peak MB"]
    headings += [name for peer in results[0].peers for name in (f"{peer.name} tok/s", "ratio", "rows equal")]
    return text_table(title, headings, [_cells(record, result, has_events) for result in results])


def _cells(record: OfflineRecord, result: BatchResult, has_events: bool) -> list[str]:
    cells = [
        str(result.rows),
        result.sampling,
        f"{result.tokens_per_s:.1f}",
        f"{result.step_share:.0%}",
        f"{result.step_ms:.3f}",
        f"{result.floor_ms:.3f}",
        f"{100 * result.floor_share:.0f}",
        f"{result.gb_per_s:.1f}",
        f"{result.prefill_ms:.1f}",
    ]
    if has_events:
        profile = record.kernels.get(result.rows)
        kernels = f"{profile.kernels_per_step:.0f}" if profile and profile.kernels else "-"
        cells += [_number(result.event_step_ms), _number(result.replay_ms), _number(result.gap_us, 1), kernels]
    cells.append(f"{result.peak_mb:.0f}")
    for peer in result.peers:
        cells += [f"{peer.tokens_per_s:.1f}", f"{peer.ratio:.2f}", f"{peer.equal_tokens:.0%}"]
    return cells


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _w3_text(result: W3Result) -> str:
    text = (
        f"W3: {result.requests} requests, {result.prompt_tokens} tokens in, {result.output_tokens} out: "
        f"{result.tokens_per_s:.0f} output tok/s, {result.seconds:.2f} s, {result.iterations} iterations"
    )
    if result.event_step_ms is None:
        return text
    return f"{text}, event ms/step {_number(result.event_step_ms)}, gap {_number(result.gap_us, 1)} µs"


def _first_token_text(result: FirstTokenResult) -> str:
    text = f"first token of {result.input_len}: median {result.median_ms:.2f} ms, least {result.least_ms:.2f} ms"
    return text if result.event_ms is None else f"{text}, its replay {result.event_ms:.2f} ms"
