"""The measurements behind ``mstar bench offline``, over one loaded engine."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from mstar.cli.bench.device_timeline import DeviceTimeline, Replays
from mstar.cli.bench.engine_run import Run, run_workload
from mstar.cli.bench.floor import peak_memory_bytes, reset_peak_memory, step_bytes
from mstar.cli.bench.workloads import Sampling, Workload, equal_rows
from mstar.engine.resources.kv.config import PagedKVSpec
from mstar.runtime.core import EngineCore


class Peer(Protocol):
    """Another engine on the same weights."""

    name: str

    def warm_up(self, workload: Workload) -> None:
        """Runs it once or more, and keeps what was fastest."""

    def generate(self, workload: Workload) -> tuple[np.ndarray, float]:
        """Tokens int64 [rows, output_len] and the seconds they took."""


@dataclass(frozen=True)
class PeerResult:
    """``ratio`` is our tok/s over the peer's; ``equal_tokens`` the share of rows whose tokens are the peer's."""

    name: str
    tokens_per_s: float
    ratio: float
    equal_tokens: float


@dataclass(frozen=True)
class BatchResult:
    """Medians over the repeats of one batch size.

    ``step_ms`` is a steady decode step by the wall clock, ``floor_ms`` what its bytes take at the memory's bandwidth.
    ``prefill_ms``: until every row had its first token.  On a GPU also, by events on the engine's stream in runs of
    their own: ``event_step_ms`` from the end of one replay to the next, ``replay_ms`` of it in the replay, and
    ``gap_us`` between two.
    """

    rows: int
    sampling: str
    tokens_per_s: float
    step_ms: float
    prefill_ms: float
    floor_ms: float
    gb_per_s: float
    peak_mb: float
    event_step_ms: float | None = None
    replay_ms: float | None = None
    gap_us: float | None = None
    peers: tuple[PeerResult, ...] = ()

    @property
    def floor_share(self) -> float:
        return self.floor_ms / self.step_ms

    @property
    def step_share(self) -> float:
        """The whole run's tok/s over what the step time alone would give."""
        return self.tokens_per_s * self.step_ms / 1e3 / self.rows


@dataclass(frozen=True)
class W3Result:
    """Medians over the repeats of the mixed workload."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    seconds: float
    iterations: int
    event_step_ms: float | None = None
    gap_us: float | None = None


@dataclass(frozen=True)
class FirstTokenResult:
    """Time from the submission of one prompt to its first token's message."""

    input_len: int
    median_ms: float
    least_ms: float
    event_ms: float | None = None  # of its replay on the device


class Bench:
    """Measures one engine.  ``timeline`` is the clock it was built with; None on a CPU."""

    def __init__(self, core: EngineCore, bandwidth: float, timeline: DeviceTimeline | None) -> None:
        """``bandwidth``: bytes per second, see :mod:`mstar.cli.bench.floor`."""
        self.core, self.bandwidth, self._timeline = core, bandwidth, timeline
        self.device = torch.device(core.info.device)

    def batch(
        self,
        rows: int,
        input_len: int,
        output_len: int,
        *,
        repeats: int = 3,
        seed: int = 0,
        sampling: Sampling | None = None,
        peers: tuple[Peer, ...] = (),
    ) -> BatchResult:
        """One batch size, after a run to warm up.  Runs of ours and of the peers alternate, so that a change of the
        machine's speed hits all."""
        sampling = sampling or Sampling()
        workload = equal_rows(rows, input_len, output_len, self.core.model.vocab_size, seed, sampling)
        self._run(workload)
        for peer in peers:
            peer.warm_up(workload)
        reset_peak_memory(self.device)
        runs, traced, theirs = [], [], []
        for _ in range(repeats):
            runs.append(self._run(workload))
            traced += self._traced(workload)
            theirs.append([peer.generate(workload) for peer in peers])
        step_ms = _median(run.step_seconds for run in runs) * 1e3
        moved = step_bytes(self.core.model.weight_bytes, self._kv_bytes, rows, input_len + output_len / 2)
        result = BatchResult(
            rows=rows,
            sampling=sampling.text,
            tokens_per_s=_median(run.num_tokens / run.seconds for run in runs),
            step_ms=step_ms,
            prefill_ms=_median(run.first_seconds for run in runs) * 1e3,
            floor_ms=moved / self.bandwidth * 1e3,
            gb_per_s=moved / step_ms / 1e6,
            peak_mb=peak_memory_bytes(self.device) / 2**20,
        )
        if traced:
            result = replace(
                result,
                event_step_ms=_median(replays.step_ms for replays in traced),
                replay_ms=_median(replays.replay_ms for replays in traced),
                gap_us=_median(replays.gap_us for replays in traced),
            )
        compared = [
            _compare(peer.name, [each[index] for each in theirs], result, runs[0]) for index, peer in enumerate(peers)
        ]
        return replace(result, peers=tuple(compared))

    def w3(self, workload: Workload, repeats: int = 1) -> W3Result:
        """Requests of mixed lengths, all submitted at once."""
        self._run(workload)
        runs = [self._run(workload) for _ in range(repeats)]
        traced = self._traced(workload, slice(0, len(runs[0].iterations)))
        return W3Result(
            requests=workload.rows,
            prompt_tokens=sum(map(len, workload.prompts)),
            output_tokens=runs[0].num_tokens,
            tokens_per_s=_median(run.num_tokens / run.seconds for run in runs),
            seconds=_median(run.seconds for run in runs),
            iterations=len(runs[0].iterations),
            event_step_ms=traced[0].step_ms if traced else None,
            gap_us=traced[0].gap_us if traced else None,
        )

    def first_token(self, input_len: int, repeats: int = 9) -> FirstTokenResult:
        """One prompt alone, of which a single token is asked."""
        workloads = [equal_rows(1, input_len, 1, self.core.model.vocab_size, seed) for seed in range(repeats)]
        for workload in workloads[:3]:
            self._run(workload)
        milliseconds = [self._run(workload).first_seconds * 1e3 for workload in workloads]
        events = [replays.replay_ms for workload in workloads for replays in self._traced(workload, slice(0, 1 << 31))]
        return FirstTokenResult(
            input_len, statistics.median(milliseconds), min(milliseconds), _median(events) if events else None
        )

    @property
    def _kv_bytes(self) -> float:
        """Bytes of keys and values that one token of context adds over all layers."""
        model = self.core.model
        configs = [spec.config for spec in model.resource_specs if isinstance(spec, PagedKVSpec)]
        return sum(config.page_bytes(model.kv_dtype.itemsize) / config.page_size for config in configs)

    def _run(self, workload: Workload) -> Run:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return run_workload(self.core, workload)

    def _traced(self, workload: Workload, iterations: slice | None = None) -> list[Replays]:
        """Replays of one more run, if they can be timed: those submitted in ``iterations``, else the steady ones."""
        if self._timeline is None:
            return []
        self._timeline.switch_on()
        run = run_workload(self.core, workload, self._timeline)
        # Running ahead, an iteration submits what the next one brings.
        steady = slice(run.steady.start, max(run.steady.stop - 1, run.steady.start))
        replays = self._timeline.switch_off().within(iterations or steady)
        return [replays] if replays.starts.size else []


def _compare(name: str, runs: list[tuple[np.ndarray, float]], ours: BatchResult, run: Run) -> PeerResult:
    rate = _median(tokens.size / seconds for tokens, seconds in runs)
    equal = float((np.stack(run.tokens) == runs[0][0]).all(axis=1).mean())
    return PeerResult(name, rate, ours.tokens_per_s / rate, equal)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
