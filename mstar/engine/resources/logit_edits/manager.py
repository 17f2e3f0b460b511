"""Edits of logits ahead of the sampler: allowed and barred ids, bad words, biases, penalties, the floor of stop ids."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self, cast

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.compositions import Compositions
from mstar.engine.resources.logit_edits.batch_edits import BatchEdits, Floor, LiveRow
from mstar.engine.resources.logit_edits.config import LogitEditsSpec, LogitEditsStep
from mstar.engine.resources.logit_edits.recent_tokens import RecentTokens
from mstar.engine.resources.logit_edits.requests import EditsOfRequests
from mstar.engine.resources.logit_edits.row_edits import RowEdits
from mstar.engine.resources.logit_edits.token_counts import TokenCounts
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep, StepContext


@dataclass
class _PlannedStep:
    edits: BatchEdits
    floor: Floor
    tokens: torch.Tensor | None = None


class LogitEdits(EditsOfRequests):
    """On the CPU.  A step's edits are laid out once per batch composition; after that it is a few operations on flat
    indices, and none where no row has edits.  What was generated moves at commit."""

    def __init__(self, spec: LogitEditsSpec, info: EngineResourceInfo) -> None:
        super().__init__(spec, info)
        self._recent = RecentTokens(info.total_rows)
        self._counts = TokenCounts(info.total_rows, spec.vocab_size)
        self._known: Compositions[BatchEdits] = Compositions()
        self._none = BatchEdits((), self._vocab, self._recent, self._counts)
        self._planned: _PlannedStep | None = None

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        """The one that serves ``info.device``."""
        assert isinstance(spec, LogitEditsSpec)
        if info.device.type == "cpu":
            return cls(spec, info)
        from mstar.engine.resources.logit_edits.device import DeviceLogitEdits

        return cast(Self, DeviceLogitEdits(spec, info))

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, LogitEditsStep)
        edits = self._edits_of(ctx, step.kept_rids)
        self._planned = _PlannedStep(edits, edits.floor(self._kept))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        planned = self._planned
        assert planned is not None, "apply before plan"
        logits = logits.float().contiguous()
        with strict_mode.opaque("logit_edits"):
            if not planned.edits.is_empty:
                planned.edits.apply(logits)
        return logits

    def hold_back(self, logits: torch.Tensor) -> torch.Tensor:
        planned = self._planned
        assert planned is not None, "hold_back before plan"
        with strict_mode.opaque("stop_floor"):
            if planned.floor.places.size:
                planned.edits.hold_back(logits, planned.floor)
        return logits

    def record(self, tokens: torch.Tensor) -> None:
        assert self._planned is not None, "record before plan"
        self._planned.tokens = tokens

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        planned, self._planned = self._planned, None
        assert planned is not None, "commit before plan"
        if planned.tokens is not None and not planned.edits.is_empty:
            planned.edits.move(planned.tokens)
            self._kept[planned.edits.kept_rows] += 1

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        self._planned = None

    def _edits_of(self, ctx: StepContext, kept: Collection[int] | None) -> BatchEdits:
        composition = self._version, ctx.rows, ctx.request_ids, kept
        edits = self._known.find(*composition)
        if edits is None:
            edits = self._known.keep(self._laid_out(ctx, kept), *composition)
        if edits.penalized_rows.size:
            self._counts.settle(int(self._kept[edits.penalized_rows].max()))
        return edits

    def _laid_out(self, ctx: StepContext, kept: Collection[int] | None) -> BatchEdits:
        places = np.flatnonzero(self._is_live[ctx.rows[: ctx.num_real]])
        if not places.size:
            return self._none
        self._recent.settle()
        live = [
            LiveRow(place, row, self._edits[row], kept is None or ctx.request_ids[place] in kept)
            for place, row in zip(places.tolist(), ctx.rows[places].tolist(), strict=True)
        ]
        return BatchEdits(live, self._vocab, self._recent, self._counts)

    def _take(self, row: int, edits: RowEdits) -> None:
        if edits.history:
            self._recent.take(row, edits.history)
        else:
            self._recent.give_back(row)
        if edits.has_penalty:
            self._counts.take(row)
        else:
            self._counts.give_back(row)

    def _drop(self, row: int) -> None:
        self._recent.give_back(row)
        self._counts.give_back(row)
