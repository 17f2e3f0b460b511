"""The step of padding rows under which a bucket is measured, warmed up and captured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mstar.engine.inputs import ModelInputsFromEngine
from mstar.engine.padding import PaddingPool
from mstar.engine.resources.base import Resource
from mstar.engine.resources.runner import StepRunner
from mstar.engine.resources.step import SlotLease, StepContext, SubmoduleStep


class DummyStep:
    """Rows 0 to ``bs`` of a padding pool under ``lease``, with ``spans`` int64 [bs] new tokens."""

    def __init__(
        self,
        lease: SlotLease,
        spans: np.ndarray,
        pool: PaddingPool,
        resources: Mapping[str, Resource],
        step_runner: StepRunner,
        *,
        is_packed: bool,
        pads_tokens: bool,
    ) -> None:
        bs = spans.size
        self.lease = lease
        self.ids = pool.ids[:bs]
        self._pool = pool
        self._resources = resources
        self._step_runner = step_runner
        self._step: SubmoduleStep | None = None
        self.ctx = StepContext(
            graph_walk=lease.bucket.graph_walk,
            request_ids=(),
            rows=pool.rows[:bs],
            spans=spans,
            padded_request_ids=self.ids,
            slot=lease.slot,
            capture=True,
            slot_lease=lease,
            is_packed=is_packed,
            pads_tokens=pads_tokens,
        )
        self.engine_inputs = ModelInputsFromEngine(
            self.ids, dict(resources), self.ctx, list(pool.infos[:bs]), captured=True
        )

    def plan(self, step: SubmoduleStep | None) -> None:
        """Admits and plans ``step``, which later plans repeat.

        Raises:
            RuntimeError: a resource does not admit it.
        """
        self._step = step
        if step is None:
            return
        outcome, resource = self._step_runner.admit(step, self.ctx)
        if not (outcome.ok and outcome.ready):
            raise RuntimeError(f"resource {resource!r} admits no dummy rows: {outcome.reason}")
        self._step_runner.plan(step, self.ctx)

    def plan_again(self) -> None:
        """After a forward: the rows back to length 0, so that shapes stay those of the first plan."""
        self.reset()
        self.plan(self._step)

    def reset(self, free: bool = False) -> None:
        """The rows back to length 0; with ``free`` they own nothing afterwards."""
        self._pool.reset(self._resources.values(), 0, len(self.ids), free=free)
