"""The least time a decode step can take on this machine: bytes that must move over the bandwidth there is."""

from __future__ import annotations

import contextlib
import time

import torch


def read_bandwidth(device: torch.device, megabytes: int = 512, repeats: int = 7) -> float:
    """Bytes per second at which ``device`` reads memory, the best of ``repeats`` sums over a float32 buffer."""
    data = torch.ones(megabytes * 2**18, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum().item()
        best = min(best, time.perf_counter() - start)
    return data.numel() * 4 / best


def step_bytes(weight_bytes: int, kv_bytes_per_token: float, rows: int, context: float) -> float:
    """Bytes a decode step of ``rows`` must read: every weight once, the keys and values of each row's context."""
    return weight_bytes + rows * context * kv_bytes_per_token


def peak_memory_bytes() -> int:
    """Largest resident size of this process since :func:`reset_peak_memory` (or its start), from /proc."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak_memory() -> None:
    """Starts the peak afresh; where the kernel does not allow it, the peak stays the process's own."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
