"""What one step is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.step import AdmitOutcome, BucketKey

_request_id = attrgetter("request_id")


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one (node, walk), in the order the forward sees them.

    In a combined walk ``row_walks`` names each row's own walk; rows of the combined walk's first constituent come
    first.  ``prompt_parts``: of each row, begin and end of the prompt tokens that this step runs; None where a row has
    no part of a prompt, or for all rows, then whole prompts less what is cached.  While its membership is unchanged,
    hand the engine the same object again: the step's preparation is reused.

    For a caller that has them already: ``rows`` and ``ids`` int64 [n] are the infos' master rows and request ids, never
    changed in place, and ``walk_sizes`` how many rows in a row have one walk.
    """

    node: str
    graph_walk: str
    infos: Sequence[RequestInfo]
    row_walks: Sequence[str] | None = None
    prompt_parts: Sequence[tuple[int, int] | None] | None = None
    rows: np.ndarray | None = None
    ids: np.ndarray | None = None
    walk_sizes: tuple[int, ...] = ()
    request_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ids = map(_request_id, self.infos) if self.ids is None else self.ids.tolist()
        object.__setattr__(self, "infos", tuple(self.infos))
        object.__setattr__(self, "request_ids", tuple(ids))

    @cached_property
    def runs(self) -> tuple[tuple[str, slice], ...]:
        """The rows as stretches of one walk each."""
        if self.row_walks is None:
            return ((self.graph_walk, slice(0, len(self.infos))),)
        runs, start = [], 0
        for size in self.walk_sizes or [len(list(group)) for _, group in groupby(self.row_walks)]:
            runs.append((self.row_walks[start], slice(start, start + size)))
            start += size
        return tuple(runs)


@dataclass
class StepResult:
    """Outcome of one step.

    ``host[name][i]`` belongs to ``request_ids[i]``: the forward's ``check_stop_buffers`` on the host, [rows, ...].
    ``outputs``: request id -> {name: [values]}, what the forward made for other nodes or the client, on the device.
    A step without effect has no ``request_ids``: either ``refused`` says what ``failed_resource`` answered, or
    ``errors`` names the rows that failed.  Rows that failed alone are in ``errors`` while the others ran; rows that
    were skipped are in neither.
    """

    request_ids: tuple[int, ...] = ()
    host: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    refused: AdmitOutcome | None = None
    failed_resource: str | None = None
    errors: dict[int, Exception] = field(default_factory=dict)
    captured: bool = False
    bucket: BucketKey | None = None
