"""The protocol through which the engine drives everything that holds per-request state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from mstar.engine.resources.step import ADMITTED, AdmitOutcome, BucketKey, ResourceStep, StepContext

if TYPE_CHECKING:
    import torch

    from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig


@dataclass(frozen=True)
class EngineResourceInfo:
    """What a resource may know when it is built.

    ``capacity`` master rows belong to real requests, ``padding_rows`` more (numbered from ``capacity``) to
    padding rows of captured steps.  Arrays indexed by master row have ``total_rows`` entries.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    capacity: int
    padding_rows: int
    num_slots: int = 1
    dependencies: Mapping[str, Resource] = field(default_factory=dict)

    @property
    def total_rows(self) -> int:
        return self.capacity + self.padding_rows

    def dependency(self, key: str) -> Resource:
        """The built resource that the spec listed in ``depends_on``; KeyError for any other."""
        return self.dependencies[key]


class Resource(ABC):
    """State of all requests in one respect, and the static buffers that captured steps read.

    All hooks run on the engine's step thread unless noted; rows are the engine's master rows.
    """

    force_double_buffer: bool = False

    @classmethod
    @abstractmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        """Builds the resource at load; may return a backend's subclass."""

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        """Takes a request on master row ``row``.  Idempotent.  ValueError for a config it cannot honour."""

    def remove_request(self, request_id: int, row: int) -> None:
        """Forgets a request and frees what it held.  Unknown ids are no error."""

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        """Reserves capacity for the step.  Idempotent for a re-driven step; a refusal leaves nothing behind."""
        return ADMITTED

    def plan(self, step: ResourceStep, ctx: StepContext) -> Any:
        """Writes the step's index arrays and static buffers; the result lands in ``ctx.plan_results``."""
        return None

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        """Makes the step's effects durable, after its forward was submitted."""

    def reset_rows(self, request_ids: Sequence[int], rows: Sequence[int], free: bool = False) -> None:
        """Padding rows only: back to length 0; with ``free`` they own nothing afterwards."""

    supports_preplan: bool = False

    def clear_preplan(self) -> None:
        """Undoes a staged plan that will not be used."""

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        """Static buffers for these buckets; only grows, and only before any capture."""

    def post_warmup_validate(self) -> None:
        """Raises RuntimeError if warm-up left anything behind."""

    def cleanup(self) -> None:
        """Frees what the process would not."""
