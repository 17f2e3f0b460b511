"""A step's segments as streams: what is planned together, and which of it belongs to requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.ragged import indptr
from mstar.engine.resources.step import MAIN_LABEL, LabelRows

_ONLY_MAIN = {MAIN_LABEL}
_MOST_KEPT = 32  # declarations of unchanged batches: a few walks, each on two slots


@dataclass(eq=False)
class PlannedRows:
    """The rows of one plan label, in the order in which they are planned, and what follows from their spans alone."""

    label: str
    rows: np.ndarray  # int64 [B], master rows
    streams: np.ndarray  # int64 [B]
    spans: np.ndarray  # int64 [B], new tokens
    num_real: int
    qo_indptr: np.ndarray  # int32 [B + 1]
    num_tokens: int
    is_decode: bool  # every row has exactly one new token
    capacity: int  # master rows from here on are padding

    @property
    def has_padding(self) -> bool:
        return self.num_real < self.rows.size

    @cached_property
    def is_real(self) -> np.ndarray:
        """int64 [B], 1 where the row belongs to a request, 0 where it is padding."""
        return (self.rows < self.capacity).astype(np.int64)

    @cached_property
    def is_real32(self) -> np.ndarray:
        """The same, int32."""
        return (self.rows < self.capacity).astype(np.int32)


@dataclass(eq=False)
class StepRows:
    """All segments of a step: by plan label, and those of real rows, label by label, as arrays int64 [n]."""

    planned: tuple[PlannedRows, ...]
    rows: np.ndarray
    streams: np.ndarray
    spans: np.ndarray
    growing: np.ndarray  # the streams whose span is not 0
    block: slice | None  # ``streams`` where each has one new token and together, in some order, they are this range
    main: np.ndarray  # those of them that are of label "main"
    is_decode: bool  # every row of every label, padding included, has exactly one new token
    labels: Mapping[str, LabelRows]  # what was resolved

    @cached_property
    def layout(self) -> tuple[tuple[str, bytes], ...]:
        """Each plan label, and which of its rows are real."""
        return tuple((part.label, part.is_real.tobytes()) for part in self.planned)

    def owner_of(self, index: int) -> tuple[int, str]:
        """Request id and label of real segment ``index``."""
        for rows in self.labels.values():
            if index < rows.num_real:
                return rows.request_ids[index], rows.label
            index -= rows.num_real
        raise IndexError(index)


class KeptRows:
    """The resolved segments of recent steps: an unchanged batch is resolved once for each slot and walk.

    Equal batches, such as one on two slots, have one array of streams, so that it may be compared by identity.
    """

    def __init__(self, streams: Streams, capacity: int) -> None:
        self._streams = streams
        self._capacity = capacity
        self._kept: dict[int, tuple[Mapping[str, LabelRows], Mapping[tuple[str, ...], str], StepRows]] = {}
        self._arrays: dict[bytes, np.ndarray] = {}

    def of(self, labels: Mapping[str, LabelRows], combined: Mapping[tuple[str, ...], str]) -> StepRows:
        """:func:`step_rows`, remembered by the identity of ``labels``."""
        kept = self._kept.get(id(labels))
        if kept is not None and (kept[1] is combined or kept[1] == combined):
            return kept[2]
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
            self._arrays.clear()
        rows = step_rows(labels, combined, self._streams, self._capacity)
        rows.streams = self._arrays.setdefault(rows.streams.tobytes(), rows.streams)
        self._kept[id(labels)] = (labels, combined, rows)  # the reference keeps the id from being another's
        return rows


def step_rows(
    labels: Mapping[str, LabelRows], combined: Mapping[tuple[str, ...], str], streams: Streams, capacity: int
) -> StepRows:
    """Resolves a step's segments.  Master rows from ``capacity`` are padding.

    Raises:
        KeyError: a combined label without segments.
    """
    of_label = {label: streams.of(label, rows.rows) for label, rows in labels.items()}
    planned = tuple(
        _planned(plan_label, group, [of_label[rows.label] for rows in group], capacity)
        for plan_label, group in group_by_plan_label(labels, combined).items()
    )
    is_decode = all(part.is_decode for part in planned)
    real_rows = joined([_head(rows.rows, rows.num_real) for rows in labels.values()])
    real_streams = joined([_head(of_label[rows.label], rows.num_real) for rows in labels.values()])
    spans = joined([_head(rows.spans, rows.num_real) for rows in labels.values()])
    growing = real_streams if is_decode or spans.all() else real_streams[spans > 0]
    return StepRows(
        planned=planned,
        rows=real_rows,
        streams=real_streams,
        spans=spans,
        growing=growing,
        block=block_of(real_streams) if is_decode else None,
        main=growing if labels.keys() == _ONLY_MAIN else growing[growing < streams.total_rows],
        is_decode=is_decode,
        labels=labels,
    )


def group_by_plan_label(
    labels: Mapping[str, LabelRows], combined: Mapping[tuple[str, ...], str]
) -> dict[str, tuple[LabelRows, ...]]:
    """Which labels are planned under which name: the combined ones end to end, each other one alone.

    Raises:
        KeyError: a combined label without segments.
    """
    if not combined:
        return {label: (rows,) for label, rows in labels.items()}
    taken = {source for sources in combined for source in sources}
    groups: dict[str, tuple[LabelRows, ...]] = {label: (rows,) for label, rows in labels.items() if label not in taken}
    for sources, plan_label in combined.items():
        missing = [source for source in sources if source not in labels]
        if missing:
            raise KeyError(f"plan label {plan_label!r} combines labels without segments: {', '.join(missing)}")
        groups[plan_label] = tuple(labels[source] for source in sources)
    return groups


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """The arrays end to end; the array itself when there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)


def _planned(label: str, group: tuple[LabelRows, ...], streams: list[np.ndarray], capacity: int) -> PlannedRows:
    rows = joined([part.rows for part in group])
    spans = joined([part.spans for part in group])
    is_decode = np.count_nonzero(spans == 1) == spans.size
    qo_indptr = np.arange(spans.size + 1, dtype=np.int32) if is_decode else indptr(spans).astype(np.int32)
    return PlannedRows(
        label=label,
        rows=rows,
        streams=joined(streams),
        spans=spans,
        num_real=sum(part.num_real for part in group),
        qo_indptr=qo_indptr,
        num_tokens=int(qo_indptr[-1]),
        is_decode=is_decode,
        capacity=capacity,
    )


def _head(array: np.ndarray, count: int) -> np.ndarray:
    return array if count == array.size else array[:count]


def block_of(streams: np.ndarray) -> slice | None:
    """The range that distinct ``streams`` [n] are, in some order; a range is updated in a fifth of the time."""
    if not streams.size:
        return None
    first, end = int(streams.min()), int(streams.max()) + 1
    return slice(first, end) if end - first == streams.size else None
