"""The order in which all captures of an engine are made, and the account of what could not be."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from mstar.engine.accelerator_graph_backend import GraphBackend
from mstar.engine.capture_memory import CaptureBudget
from mstar.engine.resources.base import Resource
from mstar.engine.resources.runner import StepRunner
from mstar.engine.resources.step import BucketKey
from mstar.utils import knobs

log = logging.getLogger(__name__)


class Captures(Protocol):
    """A runner of whole forwards or of a region: ``buckets`` it declares, ``dropped_buckets`` it could not capture."""

    name: str
    dropped_buckets: list[BucketKey]

    @property
    def buckets(self) -> Sequence[BucketKey]: ...

    def prepare_for_capture(self, resources: Mapping[str, Resource], step_runner: StepRunner) -> None: ...

    def measure(self, budget: CaptureBudget) -> None: ...

    def capture_all(self, budget: CaptureBudget) -> None: ...


def capture_graphs(runners: Sequence[Captures], backend: GraphBackend) -> None:
    """Measures every bucket of every runner, then captures runner by runner.

    Every runner's ``prepare_for_capture`` comes before: nodes share resources, and a later growth would move a
    buffer that a graph has recorded.

    Raises:
        RuntimeError: a bucket was dropped and MSTAR_REQUIRE_ACCELERATOR_GRAPHS is set.
    """
    runners = [runner for runner in runners if runner.buckets]
    if not runners:
        return
    if not backend.captures:
        log.warning("this device captures no graphs, every step runs eager")
    budget = CaptureBudget(backend)
    for runner in runners:
        runner.measure(budget)
    for runner in runners:
        runner.capture_all(budget)
    total = sum(len(runner.buckets) for runner in runners)
    dropped = [f"{runner.name}: {key}" for runner in runners for key in runner.dropped_buckets]
    if not dropped:
        log.info("captured %d buckets", total)
        return
    message = f"captured {total - len(dropped)} of {total} buckets, dropped {', '.join(dropped)}"
    if knobs.require_accelerator_graphs():
        raise RuntimeError(message)
    if backend.captures:
        log.error(message)
