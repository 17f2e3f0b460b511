"""What one step declares, and the context in which resources carry it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MAIN_LABEL = "main"


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


@dataclass(frozen=True, eq=False)
class LabelRows:
    """The segments of one label as arrays, in the order they were declared: real requests first, then padding.

    ``rows`` int64 [n] master rows, ``spans`` int64 [n] new tokens.
    """

    label: str
    request_ids: tuple[int, ...]
    rows: np.ndarray
    spans: np.ndarray
    num_real: int


@dataclass
class StepContext:
    """Engine-owned facts of the step in progress, the same for every resource.

    ``rows[i]`` is the master row of padded batch row ``i`` and ``spans[i]`` its new tokens; both int64 and of
    padded length.  Master rows of real requests lie in ``[0, capacity)``, those of padding rows above.
    ``is_packed``: the leased bucket has one token axis for ragged rows.  ``pads_tokens``: its forward sees
    ``bucket.num_tokens`` tokens however few are real; static views are of that length then.
    ``plan_results`` holds what each resource's ``plan`` returned, for the resources planned after it.
    ``label_cache`` outlives the step where its declaration does.
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
    is_packed: bool = False
    pads_tokens: bool = False
    piecewise_leases: dict[str, SlotLease] = field(default_factory=dict)
    plan_results: dict[str, Any] = field(default_factory=dict)
    label_cache: dict[int, dict[str, LabelRows]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.padded_request_ids:
            self.padded_request_ids = self.request_ids

    @property
    def num_real(self) -> int:
        """Rows that belong to requests; the rest of ``rows`` is padding."""
        return len(self.request_ids)

    def labels(self, step: ResourceStep) -> dict[str, LabelRows]:
        """The step's segments by label, in order of first appearance; without segments, every row under "main".

        Raises:
            KeyError: a segment of a request that is no row of the batch.
        """
        key = 0 if step.segments is None else id(step.segments)
        found = self.label_cache.get(key)
        if found is None:
            found = self.label_cache[key] = self._labels(step.segments)
        return found

    def padded_tokens(self, spans: np.ndarray, num_plans: int = 1) -> int:
        """Tokens of one of ``num_plans`` equal plan labels as the forward sees them, padding included."""
        total = int(spans.sum())
        if not self.pads_tokens or total == 0 or self.slot_lease is None:
            return total
        return self.slot_lease.bucket.num_tokens // num_plans

    def _labels(self, segments: tuple[Segment, ...] | None) -> dict[str, LabelRows]:
        if segments is None:
            rows = LabelRows(MAIN_LABEL, self.padded_request_ids, self.rows, self.spans, self.num_real)
            return {MAIN_LABEL: rows}
        ids, labels, spans = zip(*segments, strict=True) if segments else ((), (), ())
        if ids == self.padded_request_ids and labels.count(labels[0]) == len(labels):  # each row once, in order
            rows = LabelRows(labels[0], ids, self.rows, np.array(spans, np.int64), self.num_real)
            return {rows.label: rows}
        by_label: dict[str, list[Segment]] = {}
        for segment in segments:
            by_label.setdefault(segment.label, []).append(segment)
        row_of = dict(zip(self.padded_request_ids, self.rows.tolist(), strict=True))
        real = set(self.request_ids)
        return {
            label: LabelRows(
                label,
                tuple(s.request_id for s in group),
                np.array([row_of[s.request_id] for s in group], np.int64),
                np.array([s.span for s in group], np.int64),
                sum(s.request_id in real for s in group),
            )
            for label, group in by_label.items()
        }


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
