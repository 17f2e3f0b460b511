"""How much memory a KV cache may take."""

from __future__ import annotations

from pathlib import Path

import torch

CPU_CAP_BYTES = 2 << 30  # a cache's pages are touched in turn, so all of it becomes resident in time
CPU_SHARE = 0.25
DEVICE_SHARE = 0.8  # the rest is for activations and captures


def default_kv_bytes(wanted: int, device: torch.device) -> int:
    """``wanted`` bytes, cut to a share of the memory that is free now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(wanted, int(free * DEVICE_SHARE))
    return min(wanted, CPU_CAP_BYTES, int(available_bytes() * CPU_SHARE))


def available_bytes() -> int:
    """Memory this process may still take: the machine's, or what its control group leaves."""
    available = CPU_CAP_BYTES
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(int(limit) - int(used), 0))
    return available


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
