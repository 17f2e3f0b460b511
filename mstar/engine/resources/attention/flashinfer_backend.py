"""Attention with FlashInfer's paged kernels, whose plans are made on the host, once for all layers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mstar.engine.resources.attention.backends import LabelAttention
from mstar.engine.resources.attention.config import AttentionConfig
from mstar.engine.resources.attention.flashinfer_kernels import (
    Geometry,
    HostRows,
    PagedKernel,
    PlanOptions,
    Workspace,
)
from mstar.engine.resources.attention.flashinfer_load import load_kernels
from mstar.engine.resources.attention.flashinfer_rows import DeviceRows, RowBuffers
from mstar.engine.resources.attention.flashinfer_workspace import (
    HeadShape,
    captured_float_bytes,
    captured_int_bytes,
    decode_float_bytes,
    eager_float_bytes,
)
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.ragged import indptr
from mstar.engine.resources.step import BucketKey, StepContext
from mstar.kernels.attention import write_kv
from mstar.utils import knobs

EAGER_INT_BYTES = 8 << 20  # FlashInfer's own figure: steps of any size
LONG_ROW = 512  # query tokens a row, on average, from which the kernel for long rows is the faster


class FlashInferPlanner:
    """Keeps one kernel's workspace for every label, slot and captured bucket, made in its first plan.

    Steps of one token a row decode; a packed bucket always prefills, since its captured forward reads ``qo_indptr``.
    A slot's memory is written again only when the device is past the slot's last step.  A plan made ahead writes it
    on a stream of its own, which a later plan of the slot has to wait for when nobody else did.
    """

    not_captured_because = ""

    def __init__(self, config: AttentionConfig, kv: PagedKVManager, info: EngineResourceInfo) -> None:
        if config.deterministic:
            raise ValueError("attention backend FLASHINFER has no deterministic mode; SDPA and TRITON have")
        self._device = info.device
        self._window = config.sliding_window
        shape = kv.config
        num_sms = torch.cuda.get_device_properties(info.device).multi_processor_count if _is_cuda(info.device) else 1
        self._heads = HeadShape(shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, num_sms)
        window_left = -1 if self._window is None else self._window - 1
        geometry = Geometry(self._heads, shape.page_size, window_left, info.dtype)
        self._kernels = load_kernels(geometry, kv.cache.dtype, info.device)
        self._most_pages = shape.max_pages_per_row
        megabytes = knobs.workspace_buffer_mb()
        self._float_bytes = eager_float_bytes(self._heads) if megabytes is None else megabytes << 20
        self._float_bytes = max(self._float_bytes, decode_float_bytes(self._heads))
        self._floats: dict[tuple[str, int], torch.Tensor] = {}
        self._buffers: dict[tuple[str, int, bool], RowBuffers] = {}
        self._runners: dict[tuple[str, int, BucketKey | PagedKernel], _Runner] = {}
        self._ahead: dict[int, torch.cuda.Event] = {}  # by slot: behind what a plan ahead wrote
        self._max_bs = 0

    def plan(
        self, label: str, kv_plan: KVPlan, spans: np.ndarray, causal: bool, ctx: StepContext
    ) -> FlashInferAttention:
        own_keys = spans is kv_plan.spans or np.array_equal(spans, kv_plan.spans)
        is_decode = kv_plan.is_decode if own_keys else bool((spans == 1).all())
        num_tokens = spans.size if is_decode else int(spans.sum())
        if causal and not own_keys and (spans > kv_plan.kv_lens).any():
            raise ValueError(f"label {label!r}: causal attention with more queries than its rows hold tokens")
        if num_tokens == 0:
            return FlashInferAttention(kv_plan, None, 0, is_decode)
        ahead = None if ctx.is_preplan else self._ahead.pop(ctx.slot, None)
        if ahead is not None:
            torch.cuda.current_stream(self._device).wait_event(ahead)
        arrays = kv_plan.indptrs
        qo_indptr = arrays.qo_indptr if own_keys else indptr(spans).astype(np.int32)
        rows = self._rows_of(label, spans.size, ctx).send(qo_indptr, arrays)
        host = HostRows(*map(torch.from_numpy, (qo_indptr, arrays.paged_kv_indptr, arrays.kv_lens)))
        most_tokens = kv_plan.num_tokens if own_keys else num_tokens
        decodes = is_decode and not (ctx.slot_lease is not None and ctx.is_packed)
        runner = self._runner(label, most_tokens, spans.size, decodes, ctx)
        causal = causal and not decodes  # a row's last query sees all its keys
        runner.plan(host, np.diff(arrays.paged_kv_indptr), num_tokens, causal)
        if ctx.is_preplan and _is_cuda(self._device):
            self._ahead[ctx.slot] = torch.cuda.current_stream(self._device).record_event()
        return FlashInferAttention(kv_plan, _Planned(runner, rows, causal), num_tokens, is_decode)

    def promote(self, planned: LabelAttention, ctx: StepContext) -> None:
        self._ahead.pop(ctx.slot, None)  # the step waits for its plan; nothing of it depends on the step before

    def reserve(self, buckets: Sequence[BucketKey], max_bs: int, max_tokens: int) -> None:
        self._max_bs = max(self._max_bs, max_bs)

    def _rows_of(self, label: str, num_rows: int, ctx: StepContext) -> RowBuffers:
        key = (label, ctx.slot, ctx.slot_lease is not None)
        buffers = self._buffers.get(key)
        if buffers is None:
            buffers = self._buffers[key] = RowBuffers(self._device)
            if ctx.slot_lease is not None:  # captured: for the largest bucket, whichever comes first
                per_request = -(-num_rows // max(len(ctx.padded_request_ids), 1))  # a combined label has several
                most_rows = max(self._max_bs * per_request, num_rows)
                buffers.reserve(most_rows, most_rows * self._most_pages)
        return buffers

    def _runner(self, label: str, most_tokens: int, num_rows: int, decodes: bool, ctx: StepContext) -> _Runner:
        """What plans and runs the label's kernel; a captured bucket's stays the one of its first plan."""
        kernels = self._kernels
        if decodes:
            kernel = kernels.decode
        elif kernels.long_prefill is not None and most_tokens >= LONG_ROW * num_rows:
            kernel = kernels.long_prefill
        else:
            kernel = kernels.prefill
        key = (label, ctx.slot, kernel if ctx.slot_lease is None else ctx.slot_lease.bucket)
        runner = self._runners.get(key)
        if runner is None:
            runner = self._runners[key] = self._make_runner(kernel, label, most_tokens, num_rows, decodes, ctx)
        return runner

    def _make_runner(
        self, kernel: PagedKernel, label: str, most_tokens: int, num_rows: int, decodes: bool, ctx: StepContext
    ) -> _Runner:
        floats = self._floats.get((label, ctx.slot))
        if floats is None:
            floats = torch.zeros(self._float_bytes, dtype=torch.uint8, device=self._device)
            self._floats[label, ctx.slot] = floats
        is_captured = ctx.slot_lease is not None
        if is_captured:
            needed = captured_float_bytes(self._heads, most_tokens, num_rows)
            ints = captured_int_bytes(self._heads, most_tokens, num_rows)
        else:
            needed, ints = eager_float_bytes(self._heads), EAGER_INT_BYTES
        workspace = Workspace(
            floats,
            torch.zeros(ints, dtype=torch.uint8, device=self._device),
            torch.zeros(ints, dtype=torch.uint8, pin_memory=_is_cuda(self._device)),
        )
        # One query token a row: a plan is right for all rows that it cuts into the same number of chunks.
        keeps_plans = is_captured and decodes and self._window is None
        return _Runner(
            kernel,
            workspace,
            most_tokens if is_captured else None,
            splits=needed <= floats.numel(),
            keeps_plans=keeps_plans,
            leaves_rest=is_captured and not decodes,
        )


class FlashInferAttention:
    """One label's planned attention (see :class:`~.backends.LabelAttention`); None is planned for no queries."""

    repeats_in_graph = False  # lengths and pages are the host's

    def __init__(self, kv: KVPlan, planned: _Planned | None, num_tokens: int, is_decode: bool) -> None:
        self.kv, self.layer = kv, 0
        self.num_tokens, self.is_decode = num_tokens, is_decode
        self._planned = planned

    def attend(self, layer: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        write_kv(layer, self.kv.key_index, self.kv.value_index, k, v)
        return self.attend_stored(layer, q)

    def attend_stored(self, layer: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        planned, count = self._planned, self.num_tokens
        if planned is None:
            return torch.zeros_like(q, memory_format=torch.contiguous_format)
        if planned.runner.leaves_rest:
            out = torch.zeros_like(q, memory_format=torch.contiguous_format)
            planned.runner.run(q, layer, planned.rows, out, planned.causal)
            return out
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if count < q.shape[0]:
            out[count:] = 0
        planned.runner.run(q[:count], layer, planned.rows, out[:count], planned.causal)
        return out


class _Planned(NamedTuple):
    """A runner's plan of one step."""

    runner: _Runner
    rows: DeviceRows
    causal: bool


class _Runner:
    """One kernel over one label's rows on one slot, of any step outside a capture or of one captured bucket.

    ``max_tokens`` of a captured bucket, None outside.  ``leaves_rest``: a replay may hold fewer query tokens than its
    capture, and the kernel writes nothing for the rest.
    """

    def __init__(
        self,
        kernel: PagedKernel,
        workspace: Workspace,
        max_tokens: int | None,
        *,
        splits: bool,
        keeps_plans: bool,
        leaves_rest: bool,
    ) -> None:
        self.leaves_rest = leaves_rest
        self._kernel = kernel
        self._workspace = workspace
        self._max_tokens = max_tokens
        self._splits = splits
        self._keeps_plans = keeps_plans
        self._plan: object = None
        self._chunks: np.ndarray | None = None  # that the last plan cut each row into
        self._chunk_pages = 0  # 0: it cut none

    def plan(self, rows: HostRows, num_pages: np.ndarray, num_tokens: int, causal: bool) -> None:
        """Plans rows of ``num_pages`` [B] pages, unless the last plan is right for them too."""
        is_captured = self._max_tokens is not None
        max_tokens = num_tokens if self._max_tokens is None else self._max_tokens
        assert num_tokens <= max_tokens
        if self._chunks is not None and np.array_equal(self._cut(num_pages), self._chunks):
            return
        options = PlanOptions(max_tokens, is_captured, causal, self._splits)
        self._plan = self._kernel.plan(self._workspace, rows, options)
        if self._keeps_plans:
            self._chunk_pages = self._kernel.chunk_pages(self._workspace, self._plan)
            self._chunks = self._cut(num_pages)

    def _cut(self, num_pages: np.ndarray) -> np.ndarray:
        """Chunks of each row, as the last plan cuts."""
        if self._chunk_pages == 0:
            return np.ones_like(num_pages)
        return -(-np.maximum(num_pages, 1) // self._chunk_pages)

    def run(self, q: torch.Tensor, layer: torch.Tensor, rows: DeviceRows, out: torch.Tensor, causal: bool) -> None:
        self._kernel.run(self._workspace, self._plan, q, layer, rows, out, causal)


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"
