"""Log-probabilities of the tokens that requests ask about, before anything changed their logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, cast

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.compositions import Compositions
from mstar.engine.resources.logprobs.config import LogprobsSpec, LogprobsStep
from mstar.engine.resources.logprobs.requests import LogprobsOfRequests
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep, StepContext
from mstar.kernels.cpu.top_tokens import top_tokens
from mstar.kernels.logprobs import Told, tell


@dataclass(frozen=True, eq=False)
class _Asking:
    """Which rows of a batch composition ask: ``index`` int64 [m] are their places.  ``num_top`` int64 [m], of which
    ``most`` is the largest."""

    index: torch.Tensor
    num_top: torch.Tensor
    most: int


@dataclass
class _PlannedStep:
    asking: _Asking
    raw: torch.Tensor | None = None


class Logprobs(LogprobsOfRequests):
    """On the CPU: looks at asking rows alone.  Observed logits may be changed afterwards."""

    def __init__(self, spec: LogprobsSpec, info: EngineResourceInfo) -> None:
        super().__init__(spec, info)
        self._known: Compositions[_Asking] = Compositions()
        self._planned: _PlannedStep | None = None

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        """The one that serves ``info.device``."""
        assert isinstance(spec, LogprobsSpec)
        if info.device.type == "cpu":
            return cls(spec, info)
        from mstar.engine.resources.logprobs.device import DeviceLogprobs

        return cast(Self, DeviceLogprobs(spec, info))

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, LogprobsStep)
        super().plan(step, ctx)
        self._planned = _PlannedStep(self._asking_of(ctx))

    def observe(self, logits: torch.Tensor) -> None:
        planned = self._planned
        assert planned is not None, "observe before plan"
        index = planned.asking.index
        with strict_mode.opaque("logprobs_observe"):
            if index.numel():
                planned.raw = logits.index_select(0, index).float()

    def of(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        planned = self._planned
        assert planned is not None, "of before plan"
        asking, raw = planned.asking, planned.raw
        with strict_mode.opaque("logprobs_of"):
            if raw is None:
                return self._of_nobody(tokens.numel())
            chosen = tokens.index_select(0, asking.index)
            told = tell(raw, chosen, asking.num_top, asking.most, self._max_top, top_tokens)
            columns = self._new_untold(tokens.numel())
            for column, part in zip(columns.values(), told, strict=True):
                column.index_copy_(0, asking.index, part)
            return columns

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        super().commit(step, ctx)
        self._planned = None

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        super().abandon(step, ctx)
        self._planned = None

    def _told(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: torch.Tensor, most: int) -> Told:
        return tell(logits.float(), tokens, num_top, most, self._max_top, top_tokens)

    def _asking_of(self, ctx: StepContext) -> _Asking:
        known = self._known.find(self._version, ctx.rows)
        if known is not None:
            return known
        num_top = self._num_top[ctx.rows]
        places = np.flatnonzero(num_top >= 0)
        asking = _Asking(torch.from_numpy(places), torch.from_numpy(num_top[places]), int(num_top.max(initial=-1)))
        return self._known.keep(asking, self._version, ctx.rows)
