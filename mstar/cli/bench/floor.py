"""The least time a decode step can take on this machine: bytes that must move over the bandwidth there is."""

from __future__ import annotations

import contextlib
import time

import torch


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that ``device`` moves at best: as it copies on a GPU, as it reads on a CPU."""
    return copy_bandwidth(device) if device.type == "cuda" else read_bandwidth(device)


def read_bandwidth(device: torch.device, megabytes: int = 512, repeats: int = 7) -> float:
    """Bytes per second at which ``device`` reads memory, the best of ``repeats`` sums over a float32 buffer."""
    data = torch.ones(megabytes * 2**18, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum().item()
        best = min(best, time.perf_counter() - start)
    return data.numel() * 4 / best


def copy_bandwidth(device: torch.device, megabytes: int = 2048, repeats: int = 9) -> float:
    """Bytes per second read and written by the best of ``repeats`` copies within a GPU's memory."""
    source = torch.ones(megabytes * 2**18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / best


def step_bytes(weight_bytes: int, kv_bytes_per_token: float, rows: int, context: float) -> float:
    """Bytes a decode step of ``rows`` must read: every weight once, the keys and values of each row's context."""
    return weight_bytes + rows * context * kv_bytes_per_token


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used since :func:`reset_peak_memory` (or the start): a GPU's by torch, on a CPU all of this process's
    that was resident, from /proc."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak_memory(device: torch.device) -> None:
    """Starts the peak afresh; where the kernel does not allow it, the peak stays the process's own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
