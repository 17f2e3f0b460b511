"""What the conductor needs of an engine and of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from mstar.engine.batch import Batch, StepResult
from mstar.engine.in_flight import InFlight
from mstar.engine.inputs import RequestInfo
from mstar.engine.phase_clock import PhaseClock
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.graph import Walk


class StepEngine(Protocol):
    """What the conductor needs of :class:`mstar.engine.engine.Engine`."""

    @property
    def resources(self) -> Mapping[str, object]: ...

    @property
    def capacity(self) -> int: ...

    @property
    def clock(self) -> PhaseClock: ...

    def ingest(self, info: RequestInfo) -> None: ...

    def remove(self, request_id: int) -> None: ...

    def release(self, info: RequestInfo) -> None: ...

    def offload(self, info: RequestInfo) -> bool: ...

    def reload(self, info: RequestInfo) -> bool: ...

    def resume(
        self,
        info: RequestInfo,
        prompt_ids: np.ndarray,
        configs: Mapping[str, ResourceReqConfig],
        has_generated: bool,
    ) -> None: ...

    def max_batch_size(self, node: str, graph_walk: str) -> int | None: ...

    def packed_sizes(self, node: str, graph_walk: str) -> Sequence[int]: ...

    def splits_prompts(self, node: str) -> bool: ...

    def combined_graph_walks(self) -> Mapping[str, Mapping[str, Sequence[str]]]: ...

    def launch(self, batch: Batch) -> InFlight: ...

    def can_queue(self, batch: Batch) -> bool: ...

    def collect(self, in_flight: InFlight) -> StepResult: ...

    def pre_plan(self, batch: Batch) -> None: ...

    def extend_prefix_chains(self, rows: np.ndarray, tokens: np.ndarray) -> None: ...

    def accept_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray | None: ...

    def reason_of(self, row: int) -> str: ...

    def prepare_request(self, configs: Mapping[str, ResourceReqConfig]) -> None: ...


class ServedModel(Protocol):
    """What the conductor needs of :class:`mstar.model.registry.EngineModel`."""

    @property
    def walks(self) -> Sequence[Walk]: ...

    @property
    def resource_specs(self) -> Sequence[NodeResourceSpec]: ...

    @property
    def eos_ids(self) -> Iterable[int]: ...

    def next_walk(self, finished: str | None) -> str | None: ...
