"""Attention over the paged cache, one call per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.attention.config import AttentionConfig, AttentionSpec, AttentionStep
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import BucketKey, ResourceStep, StepContext
from mstar.kernels.attention import GATHER_BYTES, Group, attend, gathered_elements, plan_groups, write_kv
from mstar.kernels.cpu.paged_decode import PagedDecode, paged_decode_kernel


class AttentionManager(Resource):
    """Writes each layer's keys and values and attends, over what the KV plan of the step says.

    The layer cursor starts at 0 in every ``plan`` and moves by itself, once per :meth:`attend`.
    """

    def __init__(self, config: AttentionConfig, kv: PagedKVManager, info: EngineResourceInfo) -> None:
        self.config = config
        self._kv = kv
        self._device = info.device
        self._dtype = info.dtype
        self._layers = kv.cache.unbind(0)
        token_bytes = 2 * kv.config.num_kv_heads * kv.config.head_dim * kv.cache.element_size()
        self._max_gather = GATHER_BYTES // token_bytes
        self._scratch = torch.empty(0, dtype=kv.cache.dtype, device=info.device)
        self._last_index = StepBuffer(torch.int64, info.device, info.num_slots)
        self._layer = 0
        self._groups: list[Group] = []
        self._decode_kernel = None
        if info.device.type == "cpu" and info.dtype == kv.cache.dtype == torch.float32:
            heads = (kv.config.num_qo_heads, kv.config.num_kv_heads, kv.config.head_dim)
            self._decode_kernel = paged_decode_kernel(*heads, kv.config.page_size)
        self._decode: PagedDecode | None = None
        self._key_index = self._value_index = torch.empty(0, dtype=torch.int64)
        self._last_rows: torch.Tensor | None = None

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, AttentionSpec)
        kv = PagedKVManager.needed_by(spec.resource_key, spec.config.kv_cache, info)
        return cls(spec.config, kv, info)

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, AttentionStep)
        plan: KVPlan = ctx.plan_results[self.config.kv_cache]
        self._layer = 0
        self._key_index, self._value_index = plan.key_index, plan.value_index
        self._decode = None
        if plan.is_decode and self._decode_kernel is not None:
            window = self.config.sliding_window
            self._decode = PagedDecode(self._decode_kernel, plan.kv_lens, plan.page_table, window)
        else:
            self._groups = plan_groups(
                plan.starts,
                plan.spans,
                plan.page_table,
                self._kv.config.page_size,
                causal=step.causal,
                window=self.config.sliding_window,
                max_gather=self._max_gather,
                device=self._device,
                dtype=self._dtype,
            )
            gathered = gathered_elements(self._groups, self._layers[0])
            if gathered > self._scratch.numel():
                self._scratch = self._scratch.new_empty(gathered)
        self._last_rows = None
        # A packed capture has the gather in its graph, also when every prompt is one token long.
        is_packed = ctx.slot_lease is not None and ctx.slot_lease.bucket.num_tokens != ctx.slot_lease.bucket.bs
        if is_packed or not plan.is_decode:
            last = np.maximum(plan.qo_indptr[1:] - 1, 0)  # a padding row without tokens takes some token
            self._last_rows = self._last_index.put(last, ctx.slot_lease)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores this layer's keys and values and attends; each call is the next layer.

        Args:
            q: [n, query heads, head_dim]; k, v: [n, kv heads, head_dim]; n: the padded batch's new tokens.

        Returns:
            [n, query heads, head_dim].
        """
        layer = self._layers[self._layer]
        self._layer += 1
        with strict_mode.opaque("attend"):
            if self._decode is not None:
                return self._decode.attend(layer, q, k, v)
            write_kv(layer, self._key_index, self._value_index, k, v)
            return attend(self._groups, layer, q, k, v, self._scratch)

    def last_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Each row's last token: [n, d] -> [bs, d]; ``x`` itself when every row has one token."""
        return x if self._last_rows is None else torch.index_select(x, 0, self._last_rows)

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        self._last_index.reserve(max_bs)
