"""Programmatic dependent launch: a kernel may start while the one before still runs, and fetch its weights meanwhile.

The rule that makes this safe: every program of every kernel waits (:func:`wait_for_inputs`) before it reads what a
kernel wrote, and before it writes anything.  Then a kernel that has waited knows that all before it are complete.  What
a kernel in front read, and let the next one in only once it had waited, may be read without waiting.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(USE_PDL: tl.constexpr):
    """Until all that earlier kernels of the stream wrote can be read."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_dependents(USE_PDL: tl.constexpr):
    """The next kernel may be put on multiprocessors that this one leaves free."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels on ``device`` may overlap like this (compute capability 9.0 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(tensor: torch.Tensor, **options: Any) -> dict[str, Any]:
    """Keyword arguments of a launch on ``tensor``'s device: ``options``, ``USE_PDL`` and what goes with it."""
    if has_pdl(tensor.device):
        return {**options, "USE_PDL": True, "launch_pdl": True}
    return {**options, "USE_PDL": False}
