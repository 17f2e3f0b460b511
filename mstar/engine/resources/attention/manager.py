"""Attention over the paged cache, one call per layer and label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.attention.config import AttentionConfig, AttentionSpec, AttentionStep
from mstar.engine.resources.attention.plan import AttentionShape, LabelPlan
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import MAIN_LABEL, BucketKey, LabelRows, ResourceStep, StepContext
from mstar.kernels.attention import GATHER_BYTES, gathered_elements
from mstar.kernels.cpu.paged_decode import PagedDecode, PagedDecodeKernel, paged_decode_kernel


class AttentionManager(Resource):
    """Writes each layer's keys and values and attends, over what the KV plan of the step says.

    Every plan label has a layer cursor of its own, which starts at 0 in every ``plan`` and moves by itself, once per
    :meth:`attend`.
    """

    supports_preplan = True

    def __init__(self, config: AttentionConfig, kv: PagedKVManager, info: EngineResourceInfo) -> None:
        self.config = config
        self._info = info
        self._layers = kv.cache.unbind(0)
        self._kernel: PagedDecodeKernel | None = None
        if info.device.type == "cpu" and info.dtype == kv.cache.dtype == torch.float32:
            heads = (kv.config.num_qo_heads, kv.config.num_kv_heads, kv.config.head_dim)
            self._kernel = paged_decode_kernel(*heads, kv.config.page_size)
        token_bytes = 2 * kv.config.num_kv_heads * kv.config.head_dim * kv.cache.element_size()
        self._shape = AttentionShape(kv.config.page_size, GATHER_BYTES // token_bytes, info.device, info.dtype)
        self._scratch = torch.empty(0, dtype=kv.cache.dtype, device=info.device)
        self._kernels: dict[tuple[str, int], PagedDecode] = {}  # by label and slot, kept for what they keep
        self._of_slot: dict[tuple[str, int], LabelPlan] = {}  # the last that can be followed, by label and slot
        self._plans: dict[str, LabelPlan] = {}
        self._last_rows: dict[str, torch.Tensor] = {}
        self._staged: tuple[dict[str, LabelPlan], dict[str, torch.Tensor]] | None = None
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
            plans[label] = plan = self._planned(label, cache_plan, spans, step.causal, ctx.slot)
            # A packed capture has the gather in its graph, also when every prompt is one token long.
            if ctx.is_packed or not plan.is_decode:
                last_rows[label] = self._last_tokens(label, spans, ctx)
            if plan.groups:
                gathered = gathered_elements(plan.groups, self._layers[0])
                if gathered > self._scratch.numel():
                    self._scratch = self._scratch.new_empty(gathered)
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
        plan.layer += 1
        with strict_mode.opaque("attend"):
            return plan.attend(layer, q, k, v, self._scratch)

    def last_rows(self, x: torch.Tensor, label: str = MAIN_LABEL) -> torch.Tensor:
        """Each row's last token under ``label``: [n, d] -> [rows, d]; ``x`` itself when every row has one token.

        A row without tokens takes some other row's.
        """
        index = self._last_rows.get(label)
        return x if index is None else torch.index_select(x, 0, index)

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        self._max_bs = max(self._max_bs, max_bs)
        for buffer in self._last_index.values():
            buffer.reserve(self._max_bs)

    def _planned(self, label: str, cache_plan: KVPlan, spans: np.ndarray, causal: bool, slot: int) -> LabelPlan:
        """A plan for a step on ``slot``, in place of the last one there; that of another slot's step may still run."""
        plan = self._of_slot.get((label, slot))
        if plan is None or not plan.follow(cache_plan, spans, causal):
            kernel = self._kernel_of(label, slot)
            plan = LabelPlan(cache_plan, spans, causal, self.config, self._shape, kernel)
            if plan.can_follow:
                self._of_slot[label, slot] = plan
        return plan

    def _kernel_of(self, label: str, slot: int) -> PagedDecode | None:
        """What plans and calls the kernel for steps on ``slot``."""
        if self._kernel is None:
            return None
        kernel = self._kernels.get((label, slot))
        if kernel is None:
            kernel = self._kernels[label, slot] = PagedDecode(self._kernel)
        return kernel

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
