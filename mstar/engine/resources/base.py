"""The protocol through which the engine drives everything that holds per-request state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self

from mstar.engine.resources.step import ADMITTED, AdmitOutcome, BucketKey, ResourceStep, StepContext

if TYPE_CHECKING:
    import numpy as np
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


class RowVerdict(IntEnum):
    """What a resource says of a row after its token."""

    GO_ON = 0
    COMPLETE = 1  # the token is the row's last
    BROKEN = 2  # the row must end with an error


class Resource(ABC):
    """State of all requests in one respect, and the static buffers that captured steps read.

    All hooks run on the engine's step thread unless noted; rows are the engine's master rows.
    """

    force_double_buffer: bool = False  # stages through a reused host buffer behind an async copy: needs 2 slots
    has_slot_masters: bool = False  # keeps every row's last token on the device, for the row's next step
    not_captured_because: str = ""  # why no graph of this device can follow its plans; empty where graphs can

    @classmethod
    @abstractmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        """Builds the resource at load; may return a backend's subclass."""

    # Whether steps over all of a request's tokens, its generated ones too, rebuild what this resource holds of it: then
    # that is let go where the request gives its pages up, and ingested anew as it comes back.
    is_rebuilt_by_tokens: bool = False

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        """Takes a request on master row ``row``.  Idempotent.  ValueError for a config it cannot honour."""

    def prepare_request(self, config: ResourceReqConfig) -> None:
        """Slow work on a request's config before it is ingested (a grammar to compile), on a thread of its own: it
        may keep results, but touch no state of the steps.  Called where ``config.needs_preparation``.

        Raises:
            ValueError: the config cannot be honoured; the text names the request's field.
        """

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

    def repeats_in_graph(self, step: ResourceStep, ctx: StepContext) -> bool:
        """Whether ``plan`` of this very step, which ran on this slot before, would write nothing that a step in flight
        may still read: all that it needs is kept, and moved on, on the device."""
        return False

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        """Instead of :meth:`commit`, for an admitted step that another resource refused or whose plan or forward
        failed: undoes what the forward itself moved, so that the rows may run again."""

    def reset_rows(self, request_ids: Sequence[int], rows: Sequence[int], free: bool = False) -> None:
        """Padding rows only: back to length 0; with ``free`` they own nothing afterwards."""

    # Planning one step ahead, on another slot than the running step's.

    supports_preplan: bool = False  # every dependency must, too

    def promote_preplan(self, step: ResourceStep, ctx: StepContext) -> Any:
        """Instead of :meth:`plan`, when this very step was planned ahead: the staged result, completed with what only
        the previous commit settles."""
        raise NotImplementedError(f"{type(self).__name__} plans nothing ahead")

    def clear_preplan(self) -> None:
        """Undoes a staged plan that will not be used: its forks, counters and labels."""

    # Transfers and durable state.

    def admit_retrieve(self, request_id: int, node: str, graph_walk: str, published: Any) -> AdmitOutcome:
        """Whether what the request needs from elsewhere has arrived; may start a transfer."""
        return ADMITTED

    def publish(self, request_id: int) -> Any:
        """After the step's event: state that other steps or workers may rely on."""
        return None

    # Moving a request's state to the host and back; who is moved is decided elsewhere.

    supports_eviction: bool = False

    def is_offloaded(self, request_id: int) -> bool:
        return False

    def offload(self, request_id: int) -> bool:
        """Copies the request's state to the host and frees it here; False (and no effect) when it cannot."""
        return False

    def can_reload(self, request_id: int) -> bool:
        return False

    def reload(self, request_id: int) -> bool:
        """Brings an offloaded request back; False (and no effect) when there is no room now."""
        return False

    def reclaimable(self, request_id: int) -> int:
        """Pages that offloading the request would free."""
        return 0

    def get_offload_priority(self, request_id: int) -> float:
        """Higher is offloaded first."""
        return 0.0

    # Reusing what an earlier request left behind.

    prefix_skip_safe: bool = True  # a step that starts behind a cached prefix gives what the whole prompt would

    def enable_prefix_cache(self, request_id: int) -> bool:
        """Whether this resource holds a prefix cache and the request may use it."""
        return False

    def resolve_cached_prefix(self, request_id: int) -> int:
        """Leading tokens of the request's prompt that are cached; leases them.  Asked again, it answers the same."""
        return 0

    def apply_cached_prefix(
        self, request_id: int, row: int, matched_len: int, matched_ids: np.ndarray | None = None
    ) -> None:
        """The request's first step will begin behind ``matched_len`` (>= 0) cached tokens; ``matched_ids`` int64
        [matched_len] are these, None for a prompt without ids."""

    def extend_prefix_chains(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Sampled tokens int64 [n] that the requests on master rows ``rows`` [n] kept."""

    def accept_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        """Sampled tokens int64 [n] that the requests on master rows ``rows`` [n] kept, once they are on the host.

        Returns:
            What this resource says of each row, uint8 [n] of :class:`RowVerdict`; None: all go on.
        """
        return None

    def reason_of(self, row: int) -> str:
        """What of its own parameters is to blame that ``row`` is BROKEN, as the text of an error that begins with the
        request's field; empty where nothing is."""
        return ""

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        """Static buffers for these buckets; only grows, and only before any capture."""

    def post_warmup_validate(self) -> None:
        """Raises RuntimeError if warm-up left anything behind."""

    def cleanup(self) -> None:
        """Frees what the process would not."""

    def overrides(self, hook: str) -> bool:
        """Whether calling ``hook``, a method's name, does anything beyond this class's default."""
        return getattr(getattr(self, hook), "__func__", None) is not getattr(Resource, hook)
