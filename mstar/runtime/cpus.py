"""How many threads of computation this process should have."""

from __future__ import annotations

import math
import os
from pathlib import Path


def physical_cores() -> int:
    """Cores this process may run on: without hyperthreads, within its affinity and its control group's quota."""
    allowed = os.sched_getaffinity(0)
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota()))


def _core_of(cpu: int) -> tuple[str, str]:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "physical_package_id").read_text().strip(), (topology / "core_id").read_text().strip()
    except OSError:
        return "cpu", str(cpu)


def _quota() -> int:
    """Whole cores of the control group's CPU time, rounded up."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or quota "max"
        return os.cpu_count() or 1
