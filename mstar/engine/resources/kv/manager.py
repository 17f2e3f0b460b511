"""Paged KV cache: one stream per master row, pages from a shared arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.kv.config import KVReqConfig, KVStep, PagedKVConfig, PagedKVSpec
from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.plan import KVPlan, write_addresses
from mstar.engine.resources.kv.storage import zeroed
from mstar.engine.resources.ragged import indptr, ragged_arange
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import (
    ADMITTED,
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    BucketKey,
    ResourceStep,
    StepContext,
)
from mstar.utils import knobs


class PagedKVManager(Resource):
    """Keys and values of every request, in pages.

    Host state by master row: ``stored_len`` int64 [rows] tokens, ``num_pages`` int64 [rows] pages held,
    ``page_table`` int32 [rows, pages of max_seq_len].  Unheld entries of ``page_table`` are the sink page.  Padding
    rows (from ``capacity``) never hold a page: everything they write goes to the sink.

    ``cache``: ``kv_dtype`` [layers, pages, 2, page_size, kv heads, head_dim], keys at 0, values at 1.
    """

    def __init__(self, config: PagedKVConfig, info: EngineResourceInfo) -> None:
        self.config = config
        self._capacity = info.capacity
        shape = (config.max_num_pages, 2, config.page_size, config.num_kv_heads, config.head_dim)
        self.cache = zeroed((config.num_layers, *shape), info.kv_dtype, info.device)
        self.arena = PageArena(config.max_num_pages)
        self.stored_len = np.zeros(info.total_rows, np.int64)
        self.num_pages = np.zeros(info.total_rows, np.int64)
        self.page_table = np.zeros((info.total_rows, config.max_pages_per_row), np.int32)
        self._reserved = np.zeros(info.total_rows, np.int64)
        self._row_of: dict[int, int] = {}
        self._key_index, self._value_index = (StepBuffer(torch.int64, info.device, info.num_slots) for _ in range(2))
        self._debug = knobs.kv_debug_asserts()

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, PagedKVSpec)
        return cls(spec.config, info)

    @classmethod
    def needed_by(cls, resource_key: str, kv_cache: str, info: EngineResourceInfo) -> Self:
        """The cache that resource ``resource_key`` names as its ``kv_cache``; ValueError if that is something else."""
        kv = info.dependency(kv_cache)
        if not isinstance(kv, cls):
            raise ValueError(f"resource {resource_key!r}: {kv_cache!r} is no paged KV cache")
        return kv

    # Admission, asked by whoever lets requests in.

    @property
    def num_usable_pages(self) -> int:
        """Pages that streams can hold: all but the sink."""
        return self.arena.num_usable

    @property
    def free_pages(self) -> int:
        """Pages no stream holds now; some may be promised (:attr:`promised_pages`)."""
        return self.arena.num_free

    @property
    def promised_pages(self) -> int:
        """Pages that running requests have reserved and do not hold yet."""
        return int(np.maximum(self._reserved - self.num_pages, 0).sum())

    def pages_for(self, tokens: int) -> int:
        """Pages of a stream of ``tokens``, cut to ``max_seq_len``."""
        return -(-min(tokens, self.config.max_seq_len) // self.config.page_size)

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether an otherwise empty pool holds a stream of ``tokens``."""
        return self.pages_for(tokens) <= self.num_usable_pages

    def fits_now(self, tokens: int) -> bool:
        """Whether a new stream may grow to ``tokens`` beside everything that running requests have reserved."""
        return self.promised_pages + self.pages_for(tokens) <= self.free_pages

    # Requests.

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        if self._row_of.get(request_id) == row:
            return
        reserved = 0
        if isinstance(config, KVReqConfig) and config.max_tokens is not None:
            tokens = config.prompt_tokens + config.max_tokens
            reserved = self.pages_for(tokens)
            if row < self._capacity and not self.can_ever_fit(tokens):
                raise ValueError(
                    f"the request needs {reserved} KV pages of {self.config.page_size} tokens, "
                    f"the whole cache has {self.num_usable_pages}"
                )
        self._row_of[request_id] = row
        self._release(np.array([row]))
        self._reserved[row] = reserved

    def remove_request(self, request_id: int, row: int) -> None:
        if self._row_of.pop(request_id, None) is not None:
            self._release(np.array([row]))

    def reset_rows(self, request_ids: Sequence[int], rows: Sequence[int], free: bool = False) -> None:
        index = np.asarray(rows, np.int64)
        if free:
            self._release(index)
        self.stored_len[index] = 0

    def _release(self, rows: np.ndarray) -> None:
        held = self.num_pages[rows]
        if held.any():
            self.arena.free(self.page_table[np.repeat(rows, held), ragged_arange(held)])
            self.page_table[rows] = 0
            self.num_pages[rows] = 0
        self.stored_len[rows] = 0
        self._reserved[rows] = 0

    # Steps.

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        real = ctx.rows < self._capacity
        rows = ctx.rows if real.all() else ctx.rows[real]
        lengths = self.stored_len[rows] + (ctx.spans if rows is ctx.rows else ctx.spans[real])
        need = -(-lengths // self.config.page_size) - self.num_pages[rows]
        if (need <= 0).all() and (lengths <= self.config.max_seq_len).all():
            return ADMITTED
        too_long = np.flatnonzero(lengths > self.config.max_seq_len)
        if too_long.size:
            i = int(too_long[0])
            message = f"the stream would hold {int(lengths[i])} tokens, max_seq_len is {self.config.max_seq_len}"
            return AdmitOutcome(ok=False, reason=AdmitRuntimeError(message, self._id_of(rows[i], ctx)))
        need = np.maximum(need, 0)
        total = int(need.sum())
        pages = self.arena.try_allocate(total)
        if pages is None:
            free = self.arena.num_free
            first = rows[int(np.searchsorted(np.cumsum(need), free, side="right"))]
            message = f"the step needs {total} KV pages, {free} are free"
            failed = AllocationFailed(message, pages_short=total - free, request_id=self._id_of(first, ctx))
            return AdmitOutcome(ok=False, reason=failed)
        columns = np.repeat(self.num_pages[rows], need) + ragged_arange(need)
        self.page_table[np.repeat(rows, need), columns] = pages
        self.num_pages[rows] += need
        return ADMITTED

    def plan(self, step: ResourceStep, ctx: StepContext) -> KVPlan:
        starts = self.stored_len[ctx.rows]
        kv_lens = starts + ctx.spans
        width = -(-int(kv_lens.max(initial=1)) // self.config.page_size)
        page_table = self.page_table[ctx.rows, :width]
        addresses = write_addresses(starts, ctx.spans, page_table, self.config.page_size)
        return KVPlan(
            starts=starts,
            spans=ctx.spans,
            kv_lens=kv_lens,
            qo_indptr=indptr(ctx.spans),
            page_table=page_table,
            key_index=self._key_index.put(addresses, ctx.slot_lease),
            value_index=self._value_index.put(addresses + self.config.page_size, ctx.slot_lease),
            is_decode=bool((ctx.spans == 1).all()),
        )

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, KVStep)
        if step.commit:
            self.stored_len[ctx.rows[: ctx.num_real]] += ctx.spans[: ctx.num_real]
        if self._debug:
            self.check_pages()

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        for buffer in (self._key_index, self._value_index):
            buffer.reserve(max(max_bs, max_seq_len))

    def check_pages(self) -> None:
        """Asserts that free pages and the pages of all rows are all pages, each once."""
        held = self.num_pages
        self.arena.check(self.page_table[np.repeat(np.arange(held.size), held), ragged_arange(held)])

    def post_warmup_validate(self) -> None:
        if self.free_pages != self.num_usable_pages:
            raise RuntimeError(f"warm-up left {self.num_usable_pages - self.free_pages} KV pages taken")

    def _id_of(self, row: int, ctx: StepContext) -> int:
        return ctx.padded_request_ids[int(np.flatnonzero(ctx.rows == row)[0])]
