"""Attention over the paged cache, one call per layer and label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.attention.backends import LabelAttention, make_planner
from mstar.engine.resources.attention.config import AttentionConfig, AttentionSpec, AttentionStep
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import MAIN_LABEL, BucketKey, LabelRows, ResourceStep, SlotLease, StepContext


class AttentionManager(Resource):
    """Writes each layer's keys and values and attends, over what the KV plan of the step says.

    What is planned and how it is computed is the backend's (see :class:`~.backends.AttentionPlanner`).  Every plan
    label has a layer cursor of its own, which starts at 0 in every ``plan`` and moves by itself: once per
    :meth:`attend`, or per :meth:`attend_stored` behind a :meth:`next_layer`.
    """

    supports_preplan = True

    def __init__(self, config: AttentionConfig, kv: PagedKVManager, info: EngineResourceInfo) -> None:
        self.config = config
        self._info = info
        self._layers = kv.cache.unbind(0)
        self._planner = make_planner(config, kv, info)
        self.not_captured_because = self._planner.not_captured_because
        self._plans: dict[str, LabelAttention] = {}
        self._last_rows: dict[str, torch.Tensor] = {}
        self._staged: tuple[dict[str, LabelAttention], dict[str, torch.Tensor]] | None = None
        self._repeating: dict[int, tuple[ResourceStep, SlotLease]] = {}  # by slot, what its buffers hold of such steps
        self._last_index: dict[str, StepBuffer] = {}
        self._max_bs = 0

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, AttentionSpec)
        kv = PagedKVManager.needed_by(spec.resource_key, spec.config.kv_cache, info)
        return cls(spec.config, kv, info)

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, AttentionStep)
        cache_plans: dict[str, KVPlan] = ctx.plan_results[self.config.kv_cache]
        own_rows = ctx.labels(step)
        plans, last_rows = {}, {}
        for label, cache_plan in cache_plans.items():
            spans = _query_spans(cache_plan, own_rows.get(label))
            plans[label] = plan = self._planner.plan(label, cache_plan, spans, step.causal, ctx)
            # A packed capture has the gather in its graph, also when every prompt is one token long.
            if ctx.is_packed or not plan.is_decode:
                last_rows[label] = self._last_tokens(label, spans, ctx)
        self._note_repeating(step, ctx, plans)
        if ctx.is_preplan:
            self._staged = plans, last_rows
        else:
            self._plans, self._last_rows = plans, last_rows

    def promote_preplan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert self._staged is not None, "nothing was planned ahead"
        (plans, last_rows), self._staged = self._staged, None
        settled: dict[str, KVPlan] = ctx.plan_results[self.config.kv_cache]
        if plans.keys() == settled.keys() and all(plan.kv is settled[label] for label, plan in plans.items()):
            self._plans, self._last_rows = plans, last_rows
            for plan in plans.values():
                self._planner.promote(plan, ctx)
        else:
            self.plan(step, ctx)

    def clear_preplan(self) -> None:
        self._staged = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, label: str = MAIN_LABEL) -> torch.Tensor:
        """Stores this layer's keys and values under ``label`` and attends; each call is the label's next layer.

        Args:
            q: [n, query heads, head_dim]; n: the label's queries as the forward sees them, padding included.
            k, v: [m, kv heads, head_dim]; m: the label's new tokens as the forward sees them.

        Returns:
            [n, query heads, head_dim]; zeros for padding tokens of a padded bucket.

        Raises:
            KeyError: a label that the step did not plan.
            IndexError: more calls than layers.
        """
        plan = self._plans[label]
        layer = self._layers[plan.layer]
        if plan.layer == 0:
            plan.kv.begin()
        plan.layer += 1
        with strict_mode.opaque("attend"):
            return plan.attend(layer, q, k, v)

    def next_layer(self, label: str = MAIN_LABEL) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a forward that stores keys and values itself puts those of the label's next layer.

        Returns:
            The layer, ``kv_dtype`` [pages, 2, page_size, kv heads, head_dim], and int64 [m]: each new token's row in
            it, seen as [pages * 2 * page_size, kv heads, head_dim]; its value lies ``page_size`` rows further.

        Raises:
            KeyError, IndexError: as :meth:`attend`.
        """
        plan = self._plans[label]
        if plan.layer == 0:
            plan.kv.begin()
        return self._layers[plan.layer], plan.kv.key_index

    def attend_stored(self, q: torch.Tensor, label: str = MAIN_LABEL) -> torch.Tensor:
        """:meth:`attend` of the layer that :meth:`next_layer` gave, once its new keys and values are stored."""
        plan = self._plans[label]
        layer = self._layers[plan.layer]
        plan.layer += 1
        with strict_mode.opaque("attend"):
            return plan.attend_stored(layer, q)

    def last_rows(self, x: torch.Tensor, label: str = MAIN_LABEL) -> torch.Tensor:
        """Each row's last token under ``label``: [n, d] -> [rows, d]; ``x`` itself when every row has one token.

        A row without tokens takes some other row's.
        """
        index = self._last_rows.get(label)
        return x if index is None else torch.index_select(x, 0, index)

    def repeats_in_graph(self, step: ResourceStep, ctx: StepContext) -> bool:
        last = self._repeating.get(ctx.slot)
        return last is not None and last[0] is step and last[1] is ctx.slot_lease

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        self._max_bs = max(self._max_bs, max_bs)
        for buffer in self._last_index.values():
            buffer.reserve(self._max_bs)
        self._planner.reserve(buckets, max_bs, max_seq_len)

    def _note_repeating(self, step: ResourceStep, ctx: StepContext, plans: dict[str, LabelAttention]) -> None:
        if ctx.slot_lease is None:
            return
        if all(plan.repeats_in_graph for plan in plans.values()):
            self._repeating[ctx.slot] = step, ctx.slot_lease
        else:
            self._repeating.pop(ctx.slot, None)

    def _last_tokens(self, label: str, spans: np.ndarray, ctx: StepContext) -> torch.Tensor:
        buffer = self._last_index.get(label)
        if buffer is None:
            buffer = StepBuffer(torch.int64, self._info.device, self._info.num_slots)
            per_request = -(-spans.size // max(len(ctx.padded_request_ids), 1))  # a combined label has several
            buffer.reserve(self._max_bs * per_request)
            self._last_index[label] = buffer
        return buffer.put(np.maximum(np.cumsum(spans) - 1, 0), ctx.slot_lease)


def _query_spans(plan: KVPlan, own: LabelRows | None) -> np.ndarray:
    """Query tokens of each row of a plan: those that the step's own segments say, or one for each new token.

    Raises:
        ValueError: the segments name other requests than the cache's step, or in another order.
    """
    if own is None or own.spans is plan.spans or own.spans.size != plan.spans.size:
        return plan.spans  # a combined label has no segments of its own
    if not np.array_equal(own.rows, plan.rows):
        raise ValueError(f"label {plan.label!r}: attention and cache must declare the same requests in one order")
    return own.spans
