"""Edits of logits ahead of the sampler: allowed and barred ids, bad words, biases, penalties, the floor of stop ids."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.compositions import Compositions
from mstar.engine.resources.logit_edits.batch_edits import BatchEdits, Floor, LiveRow
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig, LogitEditsSpec, LogitEditsStep
from mstar.engine.resources.logit_edits.recent_tokens import RecentTokens
from mstar.engine.resources.logit_edits.row_edits import RowEdits
from mstar.engine.resources.logit_edits.token_counts import TokenCounts
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import ResourceStep, StepContext


@dataclass
class _PlannedStep:
    edits: BatchEdits
    floor: Floor
    tokens: torch.Tensor | None = None


class LogitEdits(Resource):
    """Edits each request's logits as it asked, in this order: allowed ids, bad words, bias, presence and frequency
    penalty; and, once nobody else bars tokens any more, stop ids before ``min_tokens``.

    A step's edits are laid out once per batch composition; after that it is a few operations on flat indices, and none
    where no row has edits.  What was generated lies on the device and moves at commit, so that a step may be launched
    before the host saw the tokens of the one before; how many tokens were kept is known on the host.

    Their shapes follow the batch, so a device's graph cannot hold them: capturing on one is refused.
    """

    def __init__(self, spec: LogitEditsSpec, info: EngineResourceInfo) -> None:
        self._vocab, self._capacity, self._device = spec.vocab_size, info.capacity, info.device
        self._edits: dict[int, RowEdits] = {}  # by master row, those that have any
        self._is_live = np.zeros(info.total_rows, bool)
        self._kept = np.zeros(info.total_rows, np.int64)  # tokens, of live rows, those of launched steps included
        self._recent = RecentTokens(info.total_rows, info.device)
        self._counts = TokenCounts(info.total_rows, spec.vocab_size, info.device)
        self._row_of: dict[int, int] = {}
        self._version = 0  # moves whenever a row's edits do
        self._known: Compositions[BatchEdits] = Compositions()
        self._none = BatchEdits((), self._vocab, self._recent, self._counts, self._device)
        self._planned: _PlannedStep | None = None

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, LogitEditsSpec)
        return cls(spec, info)

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        """Takes a :class:`LogitEditsReqConfig` (None edits nothing) for master row ``row``.

        A request that is already there takes new edits and keeps what it has generated.  Padding rows hold nothing.

        Raises:
            ValueError: an id outside the vocabulary, or another value that cannot be honoured; names the field.
        """
        if row >= self._capacity:
            return
        edits = None
        if config is not None:
            assert isinstance(config, LogitEditsReqConfig)
            edits = RowEdits.of(config, self._vocab)
        if self._row_of.get(request_id) != row:
            self._row_of[request_id] = row
            self._forget(row)
        self._set(row, edits)

    def remove_request(self, request_id: int, row: int) -> None:
        if self._row_of.pop(request_id, None) is not None:
            self._forget(row)

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, LogitEditsStep)
        if ctx.capture and self._device.type != "cpu":
            raise RuntimeError(f"edits of logits follow the batch and cannot be captured on {self._device.type}")
        edits = self._edits_of(ctx, step.kept_rids)
        self._planned = _PlannedStep(edits, edits.floor(self._kept))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Edits ``logits`` [rows, vocab] of the planned step: in place where they are contiguous float32, else in a
        copy that is; returns them."""
        planned = self._planned
        assert planned is not None, "apply before plan"
        logits = logits.float().contiguous()
        with strict_mode.opaque("logit_edits"):
            if not planned.edits.is_empty:
                planned.edits.apply(logits)
        return logits

    def hold_back(self, logits: torch.Tensor) -> torch.Tensor:
        """Bars the stop ids of rows with fewer than ``min_tokens`` tokens in ``logits`` float32 [rows, vocab],
        contiguous, in place; a row that has nothing else left is spared.  Returns them."""
        planned = self._planned
        assert planned is not None, "hold_back before plan"
        with strict_mode.opaque("stop_floor"):
            if planned.floor.places.size:
                planned.edits.hold_back(logits, planned.floor)
        return logits

    def record(self, tokens: torch.Tensor) -> None:
        """``tokens`` int64 [rows] were drawn; once per step.  The kept ones count as generated from its commit on."""
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
        return BatchEdits(live, self._vocab, self._recent, self._counts, self._device)

    def _set(self, row: int, edits: RowEdits | None) -> None:
        if edits is None or edits.is_empty:
            self._clear(row)
            return
        self._edits[row] = edits
        self._is_live[row] = True
        self._version += 1
        if edits.history:
            self._recent.take(row, edits.history)
        else:
            self._recent.give_back(row)
        if edits.has_penalty:
            self._counts.take(row)
        else:
            self._counts.give_back(row)

    def _clear(self, row: int) -> None:
        """The row edits nothing any more."""
        if self._edits.pop(row, None) is not None:
            self._is_live[row] = False
            self._version += 1
            self._recent.give_back(row)
            self._counts.give_back(row)

    def _forget(self, row: int) -> None:
        self._clear(row)
        self._kept[row] = 0
