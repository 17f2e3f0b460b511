"""What the conductor needs of an engine and of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from mstar.engine.batch import Batch, StepResult
from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.graph import Walk


class StepEngine(Protocol):
    """What the conductor needs of :class:`mstar.engine.engine.Engine`."""

    @property
    def resources(self) -> Mapping[str, object]: ...

    def ingest(self, info: RequestInfo) -> None: ...

    def remove(self, request_id: int) -> None: ...

    def max_batch_size(self, node: str, graph_walk: str) -> int | None: ...

    def exec(self, batch: Batch) -> StepResult: ...


class ServedModel(Protocol):
    """What the conductor needs of :class:`mstar.model.registry.EngineModel`."""

    @property
    def walks(self) -> Sequence[Walk]: ...

    @property
    def resource_specs(self) -> Sequence[NodeResourceSpec]: ...

    @property
    def eos_ids(self) -> Iterable[int]: ...

    def next_walk(self, finished: str | None) -> str | None: ...
