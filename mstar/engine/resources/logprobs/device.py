"""Log-probabilities on a device: of whole steps, whose kernels pass over the rows that nobody asks about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.logprobs.config import LogprobsSpec, LogprobsStep
from mstar.engine.resources.logprobs.requests import LogprobsOfRequests, named
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import BucketKey, ResourceStep, StepContext
from mstar.kernels.cuda.logprobs import tell
from mstar.kernels.logprobs import Told


class _Asked:
    """How many tokens each row wants, ``num_top`` int64 [bs], as long as rows and version are these."""

    def __init__(self, version: int, rows: np.ndarray, num_top: np.ndarray, sent: torch.Tensor) -> None:
        self._version, self._rows = version, rows
        self.is_nobody = bool((num_top < 0).all())
        self.num_top = sent

    def holds(self, version: int, rows: np.ndarray) -> bool:
        return self._version == version and (self._rows is rows or np.array_equal(self._rows, rows))


class DeviceLogprobs(LogprobsOfRequests):
    """A captured step can't know who asks, so it is planned who does: a number per row, sent when the batch changes."""

    force_double_buffer = True

    def __init__(self, spec: LogprobsSpec, info: EngineResourceInfo) -> None:
        super().__init__(spec, info)
        self._num_top_of_step = StepBuffer(torch.int64, info.device, info.num_slots)
        self._asked: dict[int, _Asked] = {}  # by slot, -1 for eager steps
        self._current: _Asked | None = None  # of the planned step
        self._is_captured = False
        self._raw: torch.Tensor | None = None

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, LogprobsSpec)
        return cls(spec, info)

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, LogprobsStep)
        super().plan(step, ctx)
        lease = ctx.slot_lease
        slot = -1 if lease is None else lease.slot
        asked = self._asked.get(slot)
        if asked is None or not asked.holds(self._version, ctx.rows):
            num_top = self._num_top[ctx.rows]
            asked = _Asked(self._version, ctx.rows, num_top, self._num_top_of_step.put(num_top, lease))
            self._asked[slot] = asked
        self._current, self._is_captured, self._raw = asked, lease is not None, None

    def observe(self, logits: torch.Tensor) -> None:
        assert self._current is not None, "observe before plan"
        self._raw = logits.contiguous()

    def of(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        asked, raw = self._current, self._raw
        assert asked is not None, "of before plan"
        assert raw is not None, "of before observe"
        if asked.is_nobody and not self._is_captured:
            return self._of_nobody(tokens.numel())
        return named(tell(raw, tokens, asked.num_top, self._max_top))

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        super().commit(step, ctx)
        self._current = self._raw = None

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        super().abandon(step, ctx)
        self._current = self._raw = None

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        self._num_top_of_step.reserve(max_bs)
        self._asked.clear()

    def _told(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: torch.Tensor, most: int) -> Told:
        return tell(logits.contiguous(), tokens, num_top, self._max_top)
