"""Paged KV cache: one stream per (master row, label), pages from a shared arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.kv.admission import AdmissionGate
from mstar.engine.resources.kv.config import KVReqConfig, KVStep, PagedKVConfig, PagedKVSpec, Retention
from mstar.engine.resources.kv.departures import Departures
from mstar.engine.resources.kv.eviction import KVEviction
from mstar.engine.resources.kv.fork_admission import ForkAdmission
from mstar.engine.resources.kv.forks import Forks
from mstar.engine.resources.kv.graph_steps import DeviceState
from mstar.engine.resources.kv.growth import Growth
from mstar.engine.resources.kv.offload import OffloadPool
from mstar.engine.resources.kv.offloading import Offloading
from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.pinned_ring import PinnedRing
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.kv.plan_cache import OFF, PlanCache
from mstar.engine.resources.kv.planner import Planner
from mstar.engine.resources.kv.prefix.sharing import PrefixSharing
from mstar.engine.resources.kv.step_rows import KeptRows, StepRows
from mstar.engine.resources.kv.storage import zeroed
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import (
    ADMITTED,
    AdmitOutcome,
    BucketKey,
    RequestOffloading,
    ResourceStep,
    StepContext,
)
from mstar.utils import knobs


@dataclass(frozen=True, eq=False)
class _Staged:
    """A step planned ahead.  ``generations`` int64 [n] of its real streams, at ``epoch``, must not have moved since."""

    ctx: StepContext
    rows: StepRows
    epoch: int
    generations: np.ndarray
    plans: dict[str, KVPlan]


class PagedKVManager(KVEviction, Resource):
    """Keys and values of every request, in pages.

    State by stream (see :class:`Streams`): ``stored_len``, ``num_pages``, ``generation``, ``page_table``.  Padding
    rows (from ``capacity``) never hold a page: everything they write goes to the sink.

    ``cache``: ``kv_dtype`` [layers, pages, 2, page_size, kv heads, head_dim], keys at 0, values at 1.
    ``plan_cache_stats`` counts hits, misses and mismatches; ``counters`` what the other knobs move.
    """

    supports_preplan = True

    def __init__(self, config: PagedKVConfig, info: EngineResourceInfo) -> None:
        self.config = config = config.with_environment()
        self._capacity = info.capacity
        shape = (config.max_num_pages, 2, config.page_size, config.num_kv_heads, config.head_dim)
        self.cache = zeroed((config.num_layers, *shape), info.kv_dtype, info.device)
        self._arena = PageArena(config.max_num_pages)
        self._streams = Streams(self._arena, config.page_size, config.max_pages_per_row, info.total_rows)
        self._gate = AdmissionGate(config, self._arena, info.total_rows, self._streams.by_row)
        self._forks = Forks(self._streams, self._arena, self.cache)
        self._sharing: PrefixSharing | None = None
        if config.prefix_cache:
            self._sharing = PrefixSharing.of_cache(config, info, self._arena, self._streams)
        self._departures = Departures(self._streams, self._gate, self._sharing)
        index = None if self._sharing is None else self._sharing.index
        self._growth = Growth(config, self._streams, self._arena, index)
        self._row_of: dict[int, int] = {}
        self._fork_admission = ForkAdmission(self._streams, self._forks, self._growth, self._row_of, info.capacity)
        self._offloading: Offloading | None = None
        if config.cpu_offload_pages:
            pool = OffloadPool(self.cache, config.cpu_offload_pages)
            self._offloading = Offloading(pool, self._streams, self._arena, self._growth.take)
        self.supports_eviction = self._offloading is not None
        self._configs: dict[int, KVReqConfig] = {}
        self._kept_rows = KeptRows(self._streams, info.capacity)
        self._resolved: tuple[StepContext, KVStep, StepRows] | None = None  # what the last hook looked up
        self._ahead: StepContext | None = None  # of the step that was admitted ahead
        self._staged: _Staged | None = None
        self._plan_cache_mode = knobs.kv_plan_cache()
        self._plan_cache = PlanCache(self._plan_cache_mode, config.page_size)
        self._ring = PinnedRing(0, info.device) if knobs.kv_pinned_indptrs() else None
        self._planner = Planner(
            self._streams, config.page_size, info.device, info.num_slots, self._plan_cache, self._ring
        )
        self._info = info
        self._device_state: DeviceState | None = None
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

    def keep_on_device(self) -> None:
        """Keeps page table and lengths on the device as well: plans have a view from now on.  MSTAR_KV_INGRAPH_LENGTHS
        is read here.  Asked by those who need it as they are built."""
        if self._device_state is None:
            info, page_size = self._info, self.config.page_size
            self._device_state = DeviceState(
                self._streams, page_size, info.device, info.num_slots, knobs.kv_ingraph_lengths()
            )
            self._planner.keep_on_device(self._device_state)

    # Requests.

    is_rebuilt_by_tokens = True

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        if self._row_of.get(request_id) == row:
            return
        assert config is None or isinstance(config, KVReqConfig)
        config = config or KVReqConfig()
        demand = self._demand(config, 0)
        pages = self.pages_for(demand.target) * demand.labels
        if pages > self.num_usable_pages and row < self._capacity:
            raise ValueError(
                f"the request needs {pages} KV pages of {self.config.page_size} tokens, "
                f"the whole cache has {self.num_usable_pages}"
            )
        self._row_of[request_id] = row
        self._departures.settle()
        self._let_go(row)
        self._streams.release_row(row)
        if row < self._capacity:
            self._configs[request_id] = config
            self._gate.reserve(row, demand)
            if self._sharing is not None:
                self._sharing.ingest(request_id, config)

    def remove_request(self, request_id: int, row: int) -> None:
        if self._row_of.pop(request_id, None) is None:
            return
        self._configs.pop(request_id, None)
        self._let_go(row)
        if self._sharing is not None:
            self._sharing.leave(request_id)
        self._departures.add(row)

    def reset_rows(self, request_ids: Sequence[int], rows: Sequence[int], free: bool = False) -> None:
        if min(rows, default=self._capacity) >= self._capacity:
            return  # padding rows hold nothing and get no longer
        self._departures.settle()
        index = np.asarray(rows, np.int64)
        streams = self._streams.of_rows(index[index < self._capacity])
        self._forget_chains(streams)
        if free or self._arena.is_sealed(self._streams.held_pages(streams)).any():
            self._streams.release(streams)
        else:
            self._streams.rewind(streams)

    def _let_go(self, row: int) -> None:
        """Ends what a row's streams are in the middle of."""
        if not self._forks.is_empty:
            self._forks.undo(np.array([row]))
        if self._offloading is not None:
            self._offloading.drop(np.array([row]))

    # Shared prefixes.

    def enable_prefix_cache(self, request_id: int) -> bool:
        return self._sharing is not None and self._sharing.shares(request_id)

    def resolve_cached_prefix(self, request_id: int) -> int:
        return self._sharing.resolve(request_id) if self._sharing is not None else 0

    def apply_cached_prefix(
        self, request_id: int, row: int, matched_len: int, matched_ids: np.ndarray | None = None
    ) -> None:
        if self._sharing is not None:
            self._sharing.apply(request_id, row, matched_len)

    def extend_prefix_chains(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        if self._sharing is not None:
            self._sharing.extend(rows, tokens)

    def flush_chain_backlog(self) -> None:
        """Adds all kept tokens to their chains now.  Idempotent."""
        if self._sharing is not None:
            self._sharing.flush()

    def _forget_chains(self, streams: np.ndarray) -> None:
        """What these streams hold is no longer what their chains say."""
        if self._sharing is not None:
            for stream in streams[streams < self._streams.total_rows].tolist():
                self._sharing.chains.end(stream)

    # Steps.

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        assert isinstance(step, KVStep)
        self._departures.settle()
        rows = self._rows_of_step(step, ctx)
        if ctx.is_preplan:
            self._ahead = ctx
        if not self._forks.is_empty:
            self._forks.undo(ctx.rows)  # of a step that was admitted and not committed, such as this one before
        if self._offloading is None:
            return self._admit(step, rows, ctx)
        away = self._offloading.first_offloaded(rows.streams)
        if away is not None:
            return AdmitOutcome(ok=False, reason=RequestOffloading(rows.owner_of(away)[0]))
        with self._offloading.pool.lock:
            outcome = self._admit(step, rows, ctx)
            if outcome.ok:
                self._offloading.begin_step(rows.streams)
        return outcome

    def _admit(self, step: KVStep, rows: StepRows, ctx: StepContext) -> AdmitOutcome:
        if step.pre_forks or step.post_forks:
            return self._fork_admission.admit(step, rows, ctx)
        return self._growth.keep_up(rows) or ADMITTED

    def plan(self, step: ResourceStep, ctx: StepContext) -> dict[str, KVPlan]:
        """The step's plans by plan label."""
        assert isinstance(step, KVStep)
        rows = self._rows_of_step(step, ctx)
        if not (ctx.is_preplan or self._forks.is_empty):
            self._forks.copy(ctx.rows)  # before the step writes; planned ahead, the step before may still write
        plans = self._planner.plan(rows, ctx, step.commit)
        if self._device_state is not None and not ctx.is_preplan:
            self._device_state.bring(rows, plans)
        if ctx.is_preplan:
            self._staged = _Staged(ctx, rows, self._streams.epoch, self._streams.generation[rows.streams], plans)
        if self._debug:
            self._streams.check_written(rows.streams, rows.spans)
        return plans

    def promote_preplan(self, step: ResourceStep, ctx: StepContext) -> dict[str, KVPlan]:
        staged, self._staged, self._ahead = self._staged, None, None
        assert staged is not None, "nothing was planned ahead"
        if staged.epoch != self._streams.epoch and not np.array_equal(
            self._streams.generation[staged.rows.streams], staged.generations
        ):
            return self.plan(step, ctx)
        if not self._forks.is_empty:
            self._forks.copy(ctx.rows)
        self._plan_cache.hand_over(staged.ctx, ctx)
        if self._device_state is not None:
            self._device_state.bring(staged.rows, staged.plans)
        return staged.plans

    def repeats_in_graph(self, step: ResourceStep, ctx: StepContext) -> bool:
        assert isinstance(step, KVStep)
        state = self._device_state
        return state is not None and state.kept(self._rows_of_step(step, ctx), ctx, step.commit) is not None

    def clear_preplan(self) -> None:
        if self._ahead is not None:
            self._give_up(self._ahead)
            if self._device_state is not None:
                self._device_state.discard(self._ahead.slot)
        self._staged = self._ahead = None

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, KVStep)
        if self._device_state is not None:
            self._device_state.forget(self._rows_of_step(step, ctx))
        self._give_up(ctx)

    def _give_up(self, ctx: StepContext) -> None:
        if not self._forks.is_empty:
            self._forks.undo(ctx.rows)
        if self._offloading is not None:
            self._offloading.end_step(self._streams.of_rows(ctx.rows))

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, KVStep)
        rows = self._rows_of_step(step, ctx)
        if not self._forks.is_empty:
            self._forget_chains(self._forks.targets(ctx.rows))
        if step.commit:
            before = self._streams.epoch
            if rows.block is not None:
                self._streams.advance_block(rows.block, rows.spans)
            else:
                self._streams.advance(rows.streams, rows.spans, rows.growing)
            self._growth.committed(rows, before)
            if self._device_state is not None:
                self._device_state.committed(rows, before)
            if self._plan_cache_mode != OFF:
                self._plan_cache.committed(ctx, self._streams, before)
            if self._sharing is not None:
                self._sharing.committed(rows.main, rows.is_decode)
            if step.retention is not None:
                self._retain(step.retention, rows.growing)
        if not self._forks.is_empty:
            self._forks.finish(ctx.rows)
        if self._offloading is not None:
            self._offloading.end_step(rows.streams)
        if self._debug:
            self.check_pages()

    def _retain(self, retention: Retention, streams: np.ndarray) -> None:
        first = self._streams.pages_of(retention.protected_tokens)
        for stream in streams.tolist():
            kept_from = (int(self._streams.stored_len[stream]) - retention.keep_tokens) // self.config.page_size
            if kept_from > first:
                self._streams.release_behind(stream, first, kept_from - first)
                self._forget_chains(np.array([stream]))

    def _rows_of_step(self, step: KVStep, ctx: StepContext) -> StepRows:
        last = self._resolved
        if last is not None and last[0] is ctx and last[1] is step:
            return last[2]
        rows = self._kept_rows.of(ctx.labels(step), step.combined_labels)
        self._resolved = ctx, step, rows
        return rows

    # Captured steps, and checks.

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        self._planner.reserve(max(max_bs, max_seq_len))

    def check_pages(self) -> None:
        """Asserts that free pages and the pages of everybody who holds some are all pages, counted by owner."""
        owned = [self._streams.all_pages(), *self._forks.held_pages()]
        if self._sharing is not None:
            owned += [self._sharing.index.pages(), *self._sharing.leased_pages()]
        self._arena.check(np.concatenate(owned))

    def post_warmup_validate(self) -> None:
        if self.free_pages != self.num_usable_pages:
            raise RuntimeError(f"warm-up left {self.num_usable_pages - self.free_pages} KV pages taken")
