"""Paged KV cache: one stream per (master row, label), pages from a shared arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.kv.admission import AdmissionGate, Demand
from mstar.engine.resources.kv.config import Fork, KVReqConfig, KVStep, PagedKVConfig, PagedKVSpec, Retention
from mstar.engine.resources.kv.forks import Forks
from mstar.engine.resources.kv.offload import OffloadPool
from mstar.engine.resources.kv.offloading import Offloading
from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.pinned_ring import PinnedRing
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.kv.plan_cache import OFF, PlanCache
from mstar.engine.resources.kv.planner import Planner
from mstar.engine.resources.kv.prefix.chains import PrefixChains
from mstar.engine.resources.kv.prefix.index import PrefixIndex
from mstar.engine.resources.kv.prefix.keys import prefix_root
from mstar.engine.resources.kv.prefix.sharing import PrefixSharing
from mstar.engine.resources.kv.step_rows import StepRows, step_rows
from mstar.engine.resources.kv.storage import zeroed
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import (
    ADMITTED,
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    BucketKey,
    LabelRows,
    RequestOffloading,
    ResourceStep,
    StepContext,
)
from mstar.utils import knobs

_NO_PAGES = np.empty(0, np.int32)
_MOST_KEPT_STEPS = 32  # declarations of unchanged batches: a few walks, each on two slots


@dataclass(frozen=True, eq=False)
class _Staged:
    """A step planned ahead; ``generations`` int64 [n] of its real streams, which must not have moved since."""

    ctx: StepContext
    rows: StepRows
    generations: np.ndarray
    plans: dict[str, KVPlan]


class PagedKVManager(Resource):
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
        self.arena = PageArena(config.max_num_pages)
        self._streams = Streams(self.arena, config.page_size, config.max_pages_per_row, info.total_rows)
        self._gate = AdmissionGate(config, self.arena, info.total_rows, self._streams.by_row)
        self._forks = Forks(self._streams, self.arena, self.cache)
        self._sharing = self._make_sharing(info) if config.prefix_cache else None
        self._offloading: Offloading | None = None
        if config.cpu_offload_pages:
            pool = OffloadPool(self.cache, config.cpu_offload_pages)
            self._offloading = Offloading(pool, self._streams, self.arena, self._take_pages)
        self.supports_eviction = self._offloading is not None
        self._configs: dict[int, KVReqConfig] = {}
        self._row_of: dict[int, int] = {}
        self._kept_steps: dict[int, tuple[dict[str, LabelRows], KVStep, StepRows]] = {}
        self._ahead: StepContext | None = None  # of the step that was admitted ahead
        self._staged: _Staged | None = None
        self._plan_cache_mode = knobs.kv_plan_cache()
        self._plan_cache = PlanCache(self._plan_cache_mode, config.page_size)
        self._ring = PinnedRing(0, info.device) if knobs.kv_pinned_indptrs() else None
        self._planner = Planner(
            self._streams, config.page_size, info.device, info.num_slots, self._plan_cache, self._ring
        )
        self._debug = knobs.kv_debug_asserts()

    def _make_sharing(self, info: EngineResourceInfo) -> PrefixSharing:
        config = self.config
        root = prefix_root(
            checkpoint="",  # an index lives no longer than its engine, which has one
            config=f"{config.num_layers} {config.num_kv_heads} {config.head_dim}",
            layout=config.layout,
            page_size=config.page_size,
            dtype=str(info.kv_dtype),
            world_size=config.num_shards,
            salt=config.prefix_cache_salt,
        )
        index = PrefixIndex(self.arena, config.page_size, root)
        chains = PrefixChains(
            index, config.page_size, info.total_rows, config.max_pages_per_row, knobs.kv_chain_lazy_steps()
        )
        return PrefixSharing(index, chains, self._streams, config.page_size)

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

    # State, by stream.

    @property
    def stored_len(self) -> np.ndarray:
        """Tokens stored, int64 [streams]."""
        return self._streams.stored_len

    @property
    def num_pages(self) -> np.ndarray:
        """Pages held, int64 [streams]."""
        return self._streams.num_pages

    @property
    def generation(self) -> np.ndarray:
        """Moves with every change of a stream's content, int64 [streams]."""
        return self._streams.generation

    @property
    def page_table(self) -> np.ndarray:
        """Pages in order, the sink page where none is held, int32 [streams, pages of max_seq_len]."""
        return self._streams.page_table

    def streams(self, rows: LabelRows) -> np.ndarray:
        """The streams int64 [n] of a step's rows under one label."""
        return self._streams.of(rows.label, rows.rows)

    @property
    def plan_cache_stats(self) -> Counter[str]:
        return self._plan_cache.stats

    @property
    def counters(self) -> Counter[str]:
        """``pinned_takes``: index arrays that went through the page-locked ring; and those of the prefix index, as
        ``prefix_hits``, ``prefix_misses``, ``prefix_hit_tokens``, ``prefix_insertions``, ``prefix_evictions``."""
        counters = Counter(pinned_takes=0 if self._ring is None else self._ring.takes)
        if self._sharing is not None:
            counters.update({f"prefix_{name}": n for name, n in self._sharing.index.counters.items()})
        return counters

    # Admission, asked by whoever lets requests in.

    @property
    def num_usable_pages(self) -> int:
        """Pages that streams can hold: all but the sink."""
        return self.arena.num_usable

    @property
    def free_pages(self) -> int:
        """Pages no stream holds now, those that only the prefix index holds included; some may be promised."""
        return self._gate.available

    @property
    def promised_pages(self) -> int:
        """Pages that running requests have reserved and do not hold yet."""
        return self._gate.promised

    @property
    def admission_order(self) -> str:
        """ "fifo", or "backfill": later requests may pass the head of the queue."""
        return self._gate.order

    @property
    def backfill_window(self) -> int:
        """How many of the waiting requests may be asked about; 0 without backfill."""
        return self._gate.backfill_window

    @property
    def admission_version(self) -> int:
        """Moves whenever an earlier refusal may have become wrong."""
        return self._gate.version

    def can_join(self, config: KVReqConfig) -> bool:
        """Whether a request may start now beside everything that running requests have reserved."""
        return self._gate.can_join(self._demand(config))

    def may_pass(self, config: KVReqConfig, head: KVReqConfig) -> bool:
        """Whether a request may start before ``head``, the first of the queue, which may not start now."""
        return self._gate.may_pass(self._demand(config), self._demand(head))

    def pages_for(self, tokens: int) -> int:
        """Pages of a stream of ``tokens``, cut to ``max_seq_len``."""
        return self._streams.pages_of(min(tokens, self.config.max_seq_len))

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether an otherwise empty pool holds a stream of ``tokens``."""
        return self.pages_for(tokens) <= self.num_usable_pages

    def _demand(self, config: KVReqConfig) -> Demand:
        longest, labels = self.config.max_seq_len, len(config.all_labels)
        if config.max_tokens is None:
            return Demand(min(config.prompt_tokens, longest), 0, 0, labels)
        lent = 0 if self._sharing is None else self._sharing.lent_to(config)
        target = min(config.prompt_tokens + config.max_tokens, longest)
        return Demand(min(config.prompt_tokens, longest), target, lent, labels)

    # Requests.

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        if self._row_of.get(request_id) == row:
            return
        assert config is None or isinstance(config, KVReqConfig)
        config = config or KVReqConfig()
        demand = self._demand(config)
        pages = self.pages_for(demand.target) * demand.labels
        if pages > self.num_usable_pages and row < self._capacity:
            raise ValueError(
                f"the request needs {pages} KV pages of {self.config.page_size} tokens, "
                f"the whole cache has {self.num_usable_pages}"
            )
        self._row_of[request_id] = row
        self._release(np.array([row]))
        if row < self._capacity:
            self._configs[request_id] = config
            self._gate.reserve(row, demand)
            if self._sharing is not None:
                self._sharing.ingest(request_id, config)

    def remove_request(self, request_id: int, row: int) -> None:
        if self._row_of.pop(request_id, None) is None:
            return
        self._configs.pop(request_id, None)
        rows = np.array([row])
        if not self._forks.is_empty:
            self._forks.undo(rows)
        if self._sharing is not None:
            self._sharing.leave(request_id, row)
        self._release(rows)

    def reset_rows(self, request_ids: Sequence[int], rows: Sequence[int], free: bool = False) -> None:
        index = np.asarray(rows, np.int64)
        index = index[index < self._capacity]  # padding rows hold nothing and get no longer
        if not index.size:
            return
        streams = self._streams.of_rows(index)
        self._forget_chains(streams)
        if free or self.arena.is_sealed(self._streams.held_pages(streams)).any():
            self._streams.release(streams)
        else:
            self._streams.rewind(streams)

    def _release(self, rows: np.ndarray) -> None:
        """Empties all streams of these rows, wherever they are, and takes their reservation back."""
        if not self._forks.is_empty:
            self._forks.undo(rows)
        if self._offloading is not None:
            self._offloading.drop(rows)
        self._streams.release(self._streams.of_rows(rows))
        self._gate.forget(rows)

    # Shared prefixes.

    def enable_prefix_cache(self, request_id: int) -> bool:
        return self._sharing is not None and self._sharing.shares(request_id)

    def resolve_cached_prefix(self, request_id: int) -> int:
        return self._sharing.resolve(request_id) if self._sharing is not None else 0

    def apply_cached_prefix(self, request_id: int, row: int, matched_len: int) -> None:
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

    # Requests whose state waits on the host.

    def is_offloaded(self, request_id: int) -> bool:
        return self._offloading is not None and self._offloading.is_offloaded(self._row_of[request_id])

    def offload(self, request_id: int) -> bool:
        return self._offloading is not None and self._offloading.offload(self._row_of[request_id])

    def can_reload(self, request_id: int) -> bool:
        if self._offloading is None:
            return False
        return 0 < self._offloading.pages_of(self._row_of[request_id]) <= self.free_pages

    def reload(self, request_id: int) -> bool:
        return self._offloading is not None and self._offloading.reload(self._row_of[request_id])

    def reclaimable(self, request_id: int) -> int:
        return 0 if self._offloading is None else self._offloading.reclaimable(self._row_of[request_id])

    def get_offload_priority(self, request_id: int) -> float:
        return float(self.reclaimable(request_id))

    def admit_retrieve(self, request_id: int, node: str, graph_walk: str, published: Any) -> AdmitOutcome:
        """Brings an offloaded request back for a step of this node and walk; not ready while there is no room."""
        if self._offloading is None or not self.is_offloaded(request_id):
            return ADMITTED
        row = np.array([self._row_of[request_id]])
        labels = self._configs[request_id].labels_of(node, graph_walk)
        needed = np.concatenate([self._streams.of(label, row) for label in labels])
        if self._offloading.first_offloaded(needed) is None or self.reload(request_id):
            return ADMITTED
        return AdmitOutcome(ready=False)

    # Steps.

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        assert isinstance(step, KVStep)
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
            return self._admit_with_forks(step, rows, ctx)
        grown = self._grow(rows, 0)
        return grown if isinstance(grown, AdmitOutcome) else ADMITTED

    def _grow(self, rows: StepRows, extra: int) -> np.ndarray | AdmitOutcome:
        """Gives every real stream the pages of its new tokens, and hands out ``extra`` more; or nothing of it."""
        page_size, streams = self.config.page_size, rows.streams
        lengths = self.stored_len[streams] + rows.spans
        growing = np.flatnonzero(lengths > np.minimum(self.num_pages[streams] * page_size, self.config.max_seq_len))
        if not growing.size and not extra:
            return _NO_PAGES
        too_long = np.flatnonzero(lengths > self.config.max_seq_len)
        if too_long.size:
            i = int(too_long[0])
            message = f"the stream would hold {int(lengths[i])} tokens, max_seq_len is {self.config.max_seq_len}"
            return AdmitOutcome(ok=False, reason=AdmitRuntimeError(message, rows.owner_of(i)[0]))
        need = -(-lengths[growing] // page_size) - self.num_pages[streams[growing]]
        total = int(need.sum())
        pages = self._take_pages(total + extra)
        if pages is None:
            fitting = int(np.searchsorted(np.cumsum(need), self.free_pages, side="right"))
            short = int(growing[fitting]) if fitting < growing.size else streams.size - 1
            return self._refused(total + extra, *rows.owner_of(short))
        self._streams.append(streams[growing], need, pages[:total])
        return pages[total:]

    def _admit_with_forks(self, step: KVStep, rows: StepRows, ctx: StepContext) -> AdmitOutcome:
        """Pages for the copies first: a target that also grows grows from its source's length."""
        pre = self._sized(step.pre_forks, {})
        copied = sum(size for _, _, size in pre)
        pages = self._take_pages(copied)
        if pages is None:
            return self._refused(copied, step.pre_forks[0].request_id, step.pre_forks[0].target)
        for source, target, size in pre:
            self._forks.begin(source, target, pages[:size])
            pages = pages[size:]
        grown_len = dict(zip(rows.streams.tolist(), (self.stored_len[rows.streams] + rows.spans).tolist(), strict=True))
        post = self._sized(step.post_forks, grown_len if step.commit else {})
        grown = self._grow(rows, sum(size for _, _, size in post))
        if isinstance(grown, AdmitOutcome):
            self._forks.undo(ctx.rows)
            return grown
        for source, target, size in post:
            self._forks.reserve(source, target, grown[:size])
            grown = grown[size:]
        return ADMITTED

    def _sized(self, forks: Sequence[Fork], length_of: dict[int, int]) -> list[tuple[int, int, int]]:
        """(source stream, target stream, pages of the copy) of each fork in order; ``length_of`` overrides lengths.

        Raises:
            KeyError: a request that was not ingested.
        """
        sized = []
        for fork in forks:
            row = np.array([self._row_of[fork.request_id]])
            if row[0] < self._capacity:
                source, target = (int(self._streams.of(label, row)[0]) for label in (fork.source, fork.target))
                length_of[target] = length_of.get(source, int(self.stored_len[source]))
                sized.append((source, target, self._streams.pages_of(length_of[target])))
        return sized

    def _take_pages(self, n: int) -> np.ndarray | None:
        """``n`` pages, after evicting exactly what is short; None, and nothing evicted, when that is not enough."""
        short = n - self.arena.num_free
        if short > 0 and self._sharing is not None and n <= self.free_pages:
            self._sharing.index.evict(short)
        return self.arena.try_allocate(n)

    def _refused(self, need: int, request_id: int, label: str) -> AdmitOutcome:
        free = self.free_pages
        message = f"the step needs {need} KV pages, {free} are free"
        return AdmitOutcome(ok=False, reason=AllocationFailed(message, need - free, label, request_id))

    def plan(self, step: ResourceStep, ctx: StepContext) -> dict[str, KVPlan]:
        """The step's plans by plan label."""
        assert isinstance(step, KVStep)
        rows = self._rows_of_step(step, ctx)
        if not (ctx.is_preplan or self._forks.is_empty):
            self._forks.copy(ctx.rows)  # before the step writes; planned ahead, the step before may still write
        plans = self._planner.plan(rows, ctx)
        if ctx.is_preplan:
            self._staged = _Staged(ctx, rows, self.generation[rows.streams], plans)
        if self._debug:
            self._check_written(rows)
        return plans

    def promote_preplan(self, step: ResourceStep, ctx: StepContext) -> dict[str, KVPlan]:
        staged, self._staged, self._ahead = self._staged, None, None
        assert staged is not None, "nothing was planned ahead"
        if not np.array_equal(self.generation[staged.rows.streams], staged.generations):
            return self.plan(step, ctx)
        if not self._forks.is_empty:
            self._forks.copy(ctx.rows)
        self._plan_cache.hand_over(staged.ctx, ctx)
        return staged.plans

    def clear_preplan(self) -> None:
        if self._ahead is not None:
            self._give_up(self._ahead)
        self._staged = self._ahead = None

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
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
            before = self.generation[rows.growing]
            after = before + 1
            self.stored_len[rows.streams] += rows.spans
            self.generation[rows.growing] = after
            if self._plan_cache_mode != OFF:
                self._plan_cache.committed(ctx, before, after)
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
            kept_from = (int(self.stored_len[stream]) - retention.keep_tokens) // self.config.page_size
            if kept_from > first:
                self._streams.release_behind(stream, first, kept_from - first)
                self._forget_chains(np.array([stream]))

    def _rows_of_step(self, step: KVStep, ctx: StepContext) -> StepRows:
        """The step's segments, resolved once for as long as its batch is unchanged."""
        labels = ctx.labels(step)
        kept = self._kept_steps.get(id(labels))
        if kept is not None and kept[1].combined_labels == step.combined_labels:
            return kept[2]
        if len(self._kept_steps) >= _MOST_KEPT_STEPS:
            self._kept_steps.clear()
        rows = step_rows(labels, step.combined_labels, self._streams, self._capacity)
        self._kept_steps[id(labels)] = (labels, step, rows)  # the reference keeps the id from being another's
        return rows

    # Captured steps, and checks.

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        self._planner.reserve(max(max_bs, max_seq_len))

    def check_pages(self) -> None:
        """Asserts that free pages and the pages of everybody who holds some are all pages, counted by owner."""
        owned = [self._streams.all_pages(), *self._forks.held_pages()]
        if self._sharing is not None:
            owned += [self._sharing.index.pages(), *self._sharing.leased_pages()]
        self.arena.check(np.concatenate(owned))

    def _check_written(self, rows: StepRows) -> None:
        """Asserts that the pages which the step's real rows write to have no other owner and are not sealed."""
        for stream, span in zip(rows.streams.tolist(), rows.spans.tolist(), strict=True):
            start = int(self.stored_len[stream])
            if span:
                first, end = start // self.config.page_size, self._streams.pages_of(start + span)
                pages = self.page_table[stream, first:end]
                assert (self.arena.owners(pages) == 1).all(), "a step writes to a page that has several owners"
                assert not self.arena.is_sealed(pages).any(), "a step writes to a sealed page"

    def post_warmup_validate(self) -> None:
        if self.free_pages != self.num_usable_pages:
            raise RuntimeError(f"warm-up left {self.num_usable_pages - self.free_pages} KV pages taken")
