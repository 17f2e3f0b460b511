"""Which kernels a decode step runs on the GPU, how many and for how long, as torch's profiler saw a few steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mstar.cli.bench.engine_run import run_workload
from mstar.cli.bench.workloads import Workload
from mstar.runtime.core import EngineCore

PROFILED_STEPS = 8
SETTLED = 2  # steady iterations before them
LEAST_TOKENS = 4 * PROFILED_STEPS  # outputs that leave room for both, several steps to an iteration


@dataclass(frozen=True)
class KernelUse:
    """One kernel (or copy) by name: how often it ran in a step, and its microseconds in a step, all runs together."""

    name: str
    per_step: float
    us_per_step: float


@dataclass(frozen=True)
class KernelProfile:
    """The kernels of one step; copies and fills that are no kernels stand apart.  The longest first."""

    kernels: list[KernelUse]
    copies: list[KernelUse]

    @property
    def kernels_per_step(self) -> float:
        return sum(each.per_step for each in self.kernels)

    @property
    def copies_per_step(self) -> float:
        return sum(each.per_step for each in self.copies)

    @property
    def busy_us(self) -> float:
        """Time in kernels and copies in a step, as if none overlapped."""
        return sum(each.us_per_step for each in (*self.kernels, *self.copies))


def profile_decode(core: EngineCore, workload: Workload, trace: Path | None = None) -> KernelProfile:
    """Profiles :data:`PROFILED_STEPS` steady steps of ``workload``, whose outputs have :data:`LEAST_TOKENS` or more.

    Torch's profiler slows down what comes after it too: measure times before.

    Args:
        trace: file for the trace, as Chrome and Perfetto read it (.json or .json.gz).
    """
    window = _Window(core, run_workload(core, workload).steady.start + SETTLED)
    run_workload(core, workload, on_iteration=window.look)
    window.close()
    if trace is not None:
        window.profiler.export_chrome_trace(str(trace))
    return _summary(window.profiler, window.steps)


class _Window:
    """The profiler, running from iteration ``first`` on for :data:`PROFILED_STEPS` steps or more; ``steps`` counts."""

    def __init__(self, core: EngineCore, first: int) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.steps = 0
        self._core, self._first, self._before, self._is_open = core, first, 0, False

    def look(self, iteration: int) -> None:
        """Opens or closes before an iteration."""
        if iteration == self._first:
            torch.cuda.synchronize()  # what is in flight does not count
            self._before, self._is_open = self._core.engine.steps.total(), True
            self.profiler.start()
        elif self._is_open and self._core.engine.steps.total() - self._before >= PROFILED_STEPS:
            self.close()

    def close(self) -> None:
        if self._is_open:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.steps = self._core.engine.steps.total() - self._before
            self._is_open = False


def _summary(profiler: profile, steps: int) -> KernelProfile:
    uses: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            use = uses[event.name]
            use[0] += 1 / steps
            use[1] += event.time_range.elapsed_us() / steps
    ordered = sorted((KernelUse(name, *use) for name, use in uses.items()), key=lambda use: -use.us_per_step)
    return KernelProfile(
        kernels=[use for use in ordered if not _is_copy(use.name)],
        copies=[use for use in ordered if _is_copy(use.name)],
    )


def _is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))
