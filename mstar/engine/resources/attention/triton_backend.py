"""Attention with paged kernels of our own, which find pages and lengths on the device: next to no plan on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mstar.engine.resources.attention.config import AttentionConfig
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import BucketKey, StepContext
from mstar.kernels.attention import write_kv
from mstar.kernels.paged_attention import paged_decode_reference, paged_prefill_reference

if TYPE_CHECKING:
    from mstar.engine.resources.attention.backends import LabelAttention


class PagedKernels:
    """The kernels of one cache and configuration; the torch references where the device is not CUDA."""

    def __init__(self, config: AttentionConfig, kv: PagedKVManager, info: EngineResourceInfo) -> None:
        self._options = {"window": config.sliding_window, "deterministic": config.deterministic}
        self._heads = kv.config.num_qo_heads, kv.config.num_kv_heads, kv.config.head_dim
        self._page_size = kv.config.page_size
        self._info = info
        self._is_cuda = info.device.type == "cuda"
        self._decode: Callable[..., torch.Tensor] = paged_decode_reference
        self._mixed: Callable[..., torch.Tensor] = paged_prefill_reference
        self._scratches: list[Any] = []  # the last serves; graphs may hold those before
        self._scratch_rows = 0
        if self._is_cuda:
            from mstar.kernels.cuda.paged_attention import paged_decode, paged_mixed

            self._decode, self._mixed = paged_decode, paged_mixed
            self.reserve(info.total_rows)

    def reserve(self, rows: int) -> None:
        """Scratch memory for steps of ``rows``."""
        if self._is_cuda and rows > self._scratch_rows:
            from mstar.kernels.cuda.paged_attention import DecodeScratch

            self._scratch_rows = rows
            self._scratches.append(DecodeScratch(rows, *self._heads, self._info.device))

    def store(self, layer: torch.Tensor, kv: KVPlan, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [n, kv heads, head_dim] of the first n tokens to their places."""
        if self._is_cuda:
            from mstar.kernels.cuda.store_kv import store_kv

            store_kv(layer, kv.key_index[: k.shape[0]], k, v)
        else:
            write_kv(layer, kv.key_index[: k.shape[0]], kv.value_index[: k.shape[0]], k, v)

    def new_order(self, rows: int) -> torch.Tensor | None:
        """Room for the order that decode's first layer finds and the others repeat; None where there is none."""
        if not self._is_cuda:
            return None
        from mstar.kernels.cuda.paged_attention import ROW_SHARES

        return torch.empty(rows * ROW_SHARES, dtype=torch.int32, device=self._info.device)

    def decode(
        self, q: torch.Tensor, layer: torch.Tensor, kv: KVPlan, is_first: bool, order: torch.Tensor | None
    ) -> torch.Tensor:
        """One query of each row; ``is_first``: of the plan's layers."""
        view = kv.view
        assert view is not None
        rows = view.table, view.streams, view.kv_lens
        return self._decode(q, layer, *rows, self._scratch(), repeats_rows=not is_first, order=order, **self._options)

    def mixed(
        self, q: torch.Tensor, layer: torch.Tensor, kv: KVPlan, q_indptr: torch.Tensor, causal: bool, is_first: bool
    ) -> torch.Tensor:
        """``q_indptr`` int32 [B + 1], queries of each row."""
        view = kv.view
        assert view is not None
        rows = view.table, view.streams, view.kv_lens, q_indptr
        options = {"causal": causal, "repeats_rows": not is_first, **self._options}
        return self._mixed(q, layer, *rows, self._scratch(), **options)

    def _scratch(self) -> Any:
        return self._scratches[-1] if self._scratches else None


class TritonLabelPlan:
    """One label's planned attention (:class:`~.backends.LabelAttention`).

    Args:
        spans: int64 [B], queries of each row; ``kv.spans`` itself where these are the new tokens.
        q_indptr: int32 [B + 1] on the device, the same; None where each row has one, whatever the replay.
    """

    def __init__(
        self,
        kernels: PagedKernels,
        kv: KVPlan,
        spans: np.ndarray,
        causal: bool,
        q_indptr: torch.Tensor | None,
    ) -> None:
        self.kv, self.spans, self.causal, self.layer = kv, spans, causal, 0
        self.is_decode = kv.is_decode if spans is kv.spans else bool((spans == 1).all())
        self.num_tokens = spans.size if self.is_decode else int(spans.sum())
        self.repeats_in_graph = kv.head is not None and q_indptr is None
        self._kernels = kernels
        self._q_indptr = q_indptr
        self._order: torch.Tensor | None = None  # made as the first layer runs, so a graph has one of its own

    def attend(self, layer: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores k and v of the new tokens in ``layer`` and attends."""
        self._kernels.store(layer, self.kv, k, v)
        return self.attend_stored(layer, q)

    def attend_stored(self, layer: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Attends when the new tokens are in ``layer``."""
        is_first = self.layer == 1  # counted before
        if self._q_indptr is None:
            if is_first:
                self._order = self._kernels.new_order(self.spans.size)
            return self._kernels.decode(q, layer, self.kv, is_first, self._order)
        return self._kernels.mixed(q, layer, self.kv, self._q_indptr, self.causal, is_first)


class TritonPlanner:
    """Plans are views: what the cache's plan has on the device already, and at most the queries' own indptr."""

    not_captured_because = ""

    def __init__(self, config: AttentionConfig, kv: PagedKVManager, info: EngineResourceInfo) -> None:
        """Raises ValueError where the cache is not of the forward's dtype."""
        if info.kv_dtype != info.dtype:
            raise ValueError(f"attention backend TRITON wants a cache of the model's {info.dtype}, got {info.kv_dtype}")
        kv.keep_on_device()
        self._kernels = PagedKernels(config, kv, info)
        self._info = info
        self._indptrs: dict[str, StepBuffer] = {}
        self._rows = 0
        self._kept: dict[tuple[str, int], TritonLabelPlan] = {}  # of captured decode steps, by label and slot

    def plan(self, label: str, kv_plan: KVPlan, spans: np.ndarray, causal: bool, ctx: StepContext) -> TritonLabelPlan:
        """The last plan of the slot where the cache's is the same too."""
        kept = self._kept.get((label, ctx.slot))
        if kept is not None and kept.kv is kv_plan and kept.spans is spans:
            kept.layer = 0
            return kept
        if spans is not kv_plan.spans and np.array_equal(spans, kv_plan.spans):
            spans = kv_plan.spans
        own_keys = spans is kv_plan.spans
        if causal and not own_keys and (spans > kv_plan.kv_lens).any():
            raise ValueError(f"label {label!r}: causal attention with more queries than its rows hold tokens")
        is_decode = own_keys and kv_plan.is_decode and not ctx.is_packed
        q_indptr = None if is_decode else self._queries(label, kv_plan, spans, ctx)
        self._kernels.reserve(spans.size)  # a combined label may have more rows than the bucket
        plan = TritonLabelPlan(self._kernels, kv_plan, spans, causal, q_indptr)
        if plan.repeats_in_graph:
            self._kept[label, ctx.slot] = plan
        return plan

    def promote(self, planned: LabelAttention, ctx: StepContext) -> None:
        return  # nothing of a plan depends on the step before

    def reserve(self, buckets: Sequence[BucketKey], max_bs: int, max_tokens: int) -> None:
        """Room for rows of these buckets."""
        self._rows = max(self._rows, max_bs, max_tokens)
        self._kernels.reserve(max_bs)
        for buffer in self._indptrs.values():
            buffer.reserve(self._rows + 1)

    def _queries(self, label: str, kv_plan: KVPlan, spans: np.ndarray, ctx: StepContext) -> torch.Tensor:
        if spans is kv_plan.spans:
            assert kv_plan.view is not None
            return kv_plan.view.q_indptr
        starts = np.zeros(spans.size + 1, np.int32)
        np.cumsum(spans, out=starts[1:])
        buffer = self._indptrs.get(label)
        if buffer is None:
            buffer = self._indptrs[label] = StepBuffer(torch.int32, self._info.device, self._info.num_slots)
            buffer.reserve(self._rows + 1)
        return buffer.put(starts, ctx.slot_lease)
