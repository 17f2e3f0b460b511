"""Attention with torch's scaled-dot-product attention over gathered pages; on the CPU also with a kernel of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar.engine.resources.attention.config import AttentionConfig
from mstar.engine.resources.attention.plan import AttentionShape, LabelPlan, Scratch
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.step import BucketKey, StepContext
from mstar.kernels.attention import GATHER_BYTES
from mstar.kernels.cpu.paged_decode import PagedDecode, PagedDecodeKernel, paged_decode_kernel

if TYPE_CHECKING:
    from mstar.engine.resources.attention.backends import LabelAttention


class SdpaPlanner:
    """Plans groups of rows of equal shape; follows an unchanged batch's plan in place where the kernel allows it."""

    def __init__(self, config: AttentionConfig, kv: PagedKVManager, info: EngineResourceInfo) -> None:
        self._config = config
        on_cpu = info.device.type == "cpu"  # its graphs run the planned code itself
        self.not_captured_because = "" if on_cpu else "attention backend SDPA makes each plan's page lists anew"
        self._kernel: PagedDecodeKernel | None = None
        if on_cpu and info.dtype == kv.cache.dtype == torch.float32:
            heads = (kv.config.num_qo_heads, kv.config.num_kv_heads, kv.config.head_dim)
            self._kernel = paged_decode_kernel(*heads, kv.config.page_size)
        token_bytes = 2 * kv.config.num_kv_heads * kv.config.head_dim * kv.cache.element_size()
        self._shape = AttentionShape(kv.config.page_size, GATHER_BYTES // token_bytes, info.device, info.dtype)
        self._scratch = Scratch(kv.cache[0])
        self._kernels: dict[tuple[str, int], PagedDecode] = {}  # by label and slot, kept for what they keep
        self._of_slot: dict[tuple[str, int], LabelPlan] = {}  # the last that can be followed, by label and slot

    def plan(self, label: str, kv_plan: KVPlan, spans: np.ndarray, causal: bool, ctx: StepContext) -> LabelPlan:
        """A plan for a step on the slot, in place of the last one there; that of another slot's step may still run."""
        plan = self._of_slot.get((label, ctx.slot))
        if plan is None or not plan.follow(kv_plan, spans, causal):
            kernel = self._kernel_of(label, ctx.slot)
            plan = LabelPlan(kv_plan, spans, causal, self._config, self._shape, kernel, self._scratch)
            if plan.can_follow:
                self._of_slot[label, ctx.slot] = plan
        return plan

    def promote(self, planned: LabelAttention, ctx: StepContext) -> None:
        return  # nothing of a plan depends on the step before

    def reserve(self, buckets: Sequence[BucketKey], max_bs: int, max_tokens: int) -> None:
        return  # plans allocate their own: graphs of the CPU run the planned code itself

    def _kernel_of(self, label: str, slot: int) -> PagedDecode | None:
        """What plans and calls the kernel for steps on ``slot``."""
        if self._kernel is None:
            return None
        kernel = self._kernels.get((label, slot))
        if kernel is None:
            kernel = self._kernels[label, slot] = PagedDecode(self._kernel)
        return kernel
