"""Log-probabilities on a device: of whole steps, whose kernels pass over the rows that nobody asks about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.compositions import Compositions
from mstar.engine.resources.logprobs.config import LogprobsSpec, LogprobsStep
from mstar.engine.resources.logprobs.requests import LogprobsOfRequests, named
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import BucketKey, ResourceStep, StepContext
from mstar.kernels.cuda.logprobs import tell
from mstar.kernels.logprobs import Told


class _Asked(NamedTuple):
    """How many tokens each row wants, ``num_top`` int64 [bs] on the device."""

    is_nobody: bool
    num_top: torch.Tensor


class DeviceLogprobs(LogprobsOfRequests):
    """A captured step can't know who asks, so it is planned who does: a number per row, sent when the batch changes."""

    force_double_buffer = True

    def __init__(self, spec: LogprobsSpec, info: EngineResourceInfo) -> None:
        super().__init__(spec, info)
        self._num_top_of_step = StepBuffer(torch.int64, info.device, info.num_slots)
        # By slot, -1 for eager steps: what its buffer holds.
        self._asked: defaultdict[int, Compositions[_Asked]] = defaultdict(lambda: Compositions(1))
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
        asked = self._asked[slot].find(self._version, ctx.rows)
        if asked is None:
            num_top = self._num_top[ctx.rows]
            asked = _Asked(bool((num_top < 0).all()), self._num_top_of_step.put(num_top, lease))
            self._asked[slot].keep(asked, self._version, ctx.rows)
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
