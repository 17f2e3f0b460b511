"""What one step declares, and the context in which resources carry it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Segment(NamedTuple):
    """``span`` new tokens of one request under one label; span 0 reads without growth."""

    request_id: int
    label: str
    span: int


@dataclass(frozen=True)
class ResourceStep:
    """What one resource is asked for in a step.  Without segments it takes the submodule step's."""

    segments: tuple[Segment, ...] | None = None


@dataclass(frozen=True)
class SubmoduleStep:
    """One :class:`ResourceStep` per resource key.  Hands its own segments to the steps that have none."""

    steps: Mapping[str, ResourceStep]
    segments: tuple[Segment, ...] | None = None
    cg_key_info: Hashable | None = None

    def __post_init__(self) -> None:
        if self.segments is not None:
            filled = {
                key: step if step.segments is not None else dataclasses.replace(step, segments=self.segments)
                for key, step in self.steps.items()
            }
            object.__setattr__(self, "steps", filled)

    def get(self, key: str) -> ResourceStep | None:
        return self.steps.get(key)

    def keys(self) -> Iterator[str]:
        return iter(self.steps)

    def __contains__(self, key: str) -> bool:
        return key in self.steps


@dataclass(frozen=True)
class BucketKey:
    """The shape of one capture: its walk, rows and static-buffer tokens, and what else tells captures apart."""

    graph_walk: str
    bs: int
    num_tokens: int
    cg_key_info: Hashable | None = None

    def __str__(self) -> str:
        return f"{self.graph_walk}[bs={self.bs},tokens={self.num_tokens},key={self.cg_key_info}]"


@dataclass(frozen=True)
class SlotLease:
    """The right to use one slot's static buffers of one captured bucket.  No lease means an eager step."""

    slot: int
    bucket: BucketKey


@dataclass
class StepContext:
    """Engine-owned facts of the step in progress, the same for every resource.

    ``rows[i]`` is the master row of padded batch row ``i`` and ``spans[i]`` its new tokens; both int64 and of
    padded length.  Master rows of real requests lie in ``[0, capacity)``, those of padding rows above.
    ``plan_results`` holds what each resource's ``plan`` returned, for the resources planned after it.
    """

    graph_walk: str
    request_ids: tuple[int, ...]
    rows: np.ndarray
    spans: np.ndarray
    padded_request_ids: tuple[int, ...] = ()
    slot: int = 0
    capture: bool = False
    is_preplan: bool = False
    slot_lease: SlotLease | None = None
    piecewise_leases: dict[str, SlotLease] = field(default_factory=dict)
    plan_results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.padded_request_ids:
            self.padded_request_ids = self.request_ids

    @property
    def num_real(self) -> int:
        """Rows that belong to requests; the rest of ``rows`` is padding."""
        return len(self.request_ids)


@dataclass(frozen=True)
class AllocationFailed:
    """A resource is short of capacity now; the conductor may evict or hold, then retry."""

    message: str
    pages_short: int = 0
    label: str = "main"
    request_id: int = -1


@dataclass(frozen=True)
class RequestOffloading:
    """A request's state is on its way to the host; requeue it."""

    request_id: int


@dataclass(frozen=True)
class AdmitRuntimeError:
    """The request cannot be served; fail it with this message."""

    message: str
    request_id: int = -1


@dataclass(frozen=True)
class AdmitOutcome:
    """ok and ready: run.  ok, not ready: ask again.  Not ok: ``reason`` says why."""

    ok: bool = True
    ready: bool = True
    reason: AllocationFailed | RequestOffloading | AdmitRuntimeError | None = None


ADMITTED = AdmitOutcome()
