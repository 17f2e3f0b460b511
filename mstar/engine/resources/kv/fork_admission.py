"""Pages for steps that copy streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mstar.engine.resources.kv.config import Fork, KVStep
from mstar.engine.resources.kv.forks import Forks
from mstar.engine.resources.kv.growth import Growth
from mstar.engine.resources.kv.step_rows import StepRows
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.step import ADMITTED, AdmitOutcome, StepContext


class ForkAdmission:
    """Reserves what the forks of a step and its rows take together.

    ``row_of``: master row by request id, as of now; those from ``capacity`` are padding and copy nothing.
    """

    def __init__(
        self, streams: Streams, forks: Forks, growth: Growth, row_of: Mapping[int, int], capacity: int
    ) -> None:
        self._streams = streams
        self._forks = forks
        self._growth = growth
        self._row_of = row_of
        self._capacity = capacity

    def admit(self, step: KVStep, rows: StepRows, ctx: StepContext) -> AdmitOutcome:
        """Pages for the copies first: a target that also grows grows from its source's length.

        Raises:
            KeyError: a fork of a request that was not ingested.
        """
        pre = self._sized(step.pre_forks, {})
        copied = sum(size for _, _, size in pre)
        pages = self._growth.take(copied)
        if pages is None:
            return self._growth.refused(copied, step.pre_forks[0].request_id, step.pre_forks[0].target)
        for source, target, size in pre:
            self._forks.begin(source, target, pages[:size])
            pages = pages[size:]
        grown_len = dict(
            zip(rows.streams.tolist(), (self._streams.stored_len[rows.streams] + rows.spans).tolist(), strict=True)
        )
        post = self._sized(step.post_forks, grown_len if step.commit else {})
        reserved = self._growth.grow(rows, sum(size for _, _, size in post))
        if isinstance(reserved, AdmitOutcome):
            self._forks.undo(ctx.rows)
            return reserved
        for source, target, size in post:
            self._forks.reserve(source, target, reserved[:size])
            reserved = reserved[size:]
        return ADMITTED

    def _sized(self, forks: Sequence[Fork], length_of: dict[int, int]) -> list[tuple[int, int, int]]:
        """(source stream, target stream, pages of the copy) of each fork in order; ``length_of`` overrides lengths."""
        sized = []
        for fork in forks:
            row = np.array([self._row_of[fork.request_id]])
            if row[0] < self._capacity:
                source, target = (int(self._streams.of(label, row)[0]) for label in (fork.source, fork.target))
                length_of[target] = length_of.get(source, int(self._streams.stored_len[source]))
                sized.append((source, target, self._streams.pages_of(length_of[target])))
        return sized
