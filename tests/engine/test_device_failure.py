"""A device that fails for good: its steps fail at once and together, and only a new process has it back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mstar.engine.accelerator_graph_backend import CpuGraphBackend, HostCopy
from mstar.engine.batch import Batch

from .toy import expected, generate, make_engine, request

WORDS = "an illegal memory access was encountered"


class Breakable(CpuGraphBackend):
    """A device whose calls raise once it ``is_broken``: for good if it ``is_lost``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = self.is_lost = False
        self.num_asked = 0

    def failure(self):
        self.num_asked += 1
        return WORDS if self.is_lost else None

    def check(self, *_):
        if self.is_broken:
            raise RuntimeError(WORDS)

    def copy_to_host(self, tensors):
        return _Copy(self, super().copy_to_host(tensors))


class _Copy(HostCopy):
    def __init__(self, backend, inner):
        self._backend, self._inner = backend, inner

    def wait(self):
        self._backend.check()
        return self._inner.wait()


@pytest.fixture
def running():
    backend = Breakable()
    engine, submodule, _ = make_engine(backend=backend)
    submodule.hook = backend.check
    infos = [request(i, [i + 1]) for i in range(3)]
    for info in infos:
        engine.ingest(info)
    return engine, backend, infos


def test_a_launch_on_it_fails_all_rows_and_none_runs_again(running):
    engine, backend, infos = running
    backend.is_broken = backend.is_lost = True
    flight = engine.launch(Batch("LLM", "prefill", infos))
    assert {str(error) for error in flight.errors.values()} == {WORDS}
    assert set(flight.errors) == {0, 1, 2}
    assert engine.counters["retried_steps"] == 0
    assert engine.device_failure == WORDS


def test_what_shows_only_as_the_step_is_collected_counts_too(running):
    engine, backend, infos = running
    flight = engine.launch(Batch("LLM", "prefill", infos))
    backend.is_broken = backend.is_lost = True
    assert engine.device_failure is None
    result = engine.collect(flight)
    assert (result.request_ids, set(result.errors)) == ((), {0, 1, 2})
    assert engine.device_failure == WORDS


def test_requests_leave_without_touching_it(running):
    engine, backend, infos = running
    backend.is_broken = backend.is_lost = True
    engine.launch(Batch("LLM", "prefill", infos))
    for resource in engine.resources.values():
        resource.remove_request = backend.check
    for info in infos:
        engine.remove(info.request_id)


def test_an_error_that_passes_is_none_of_it(running):
    """Such as memory that was short for a moment."""
    engine, backend, infos = running
    backend.is_broken = True
    flight = engine.launch(Batch("LLM", "prefill", infos))
    assert set(flight.errors) == {0, 1, 2}
    assert engine.counters["retried_steps"] == 1
    backend.is_broken = False
    assert engine.device_failure is None
    assert generate(engine, infos, 2) == {i: expected([i + 1], 2) for i in range(3)}


def test_while_all_goes_well_nobody_waits_for_the_device_to_say_so(running):
    engine, backend, infos = running
    generate(engine, infos, 3)
    assert backend.num_asked == 0


FAULTS = """
import torch
from mstar.engine.cuda_graph_backend import CudaGraphBackend
device = torch.device("cuda", 0)
backend = CudaGraphBackend(device)
assert backend.failure() is None
try:
    torch.empty(2**50, device=device)
except RuntimeError:
    pass
assert backend.failure() is None
torch.zeros(4, device=device)[torch.tensor([10**6], device=device)]
print(backend.failure(), "|", backend.failure(), flush=True)
import os; os._exit(0)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_tells_a_fault_of_a_kernel_from_too_little_memory():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120)
    first, again = done.stdout.strip().splitlines()[-1].split(" | ")
    assert first == again != "None"
