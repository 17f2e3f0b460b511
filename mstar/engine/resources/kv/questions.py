"""What is asked of the cache from outside its steps: whether a request may join, and what there is."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mstar.engine.resources.kv.admission import AdmissionGate, Demand
from mstar.engine.resources.kv.config import KVReqConfig, PagedKVConfig
from mstar.engine.resources.kv.departures import Departures
from mstar.engine.resources.kv.graph_steps import DeviceState
from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.pinned_ring import PinnedRing
from mstar.engine.resources.kv.plan_cache import PlanCache
from mstar.engine.resources.kv.prefix.sharing import PrefixSharing
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.step import LabelRows


class KVQuestions:
    """The part of the manager that only answers; nothing here changes what a stream holds."""

    config: PagedKVConfig
    _arena: PageArena
    _streams: Streams
    _gate: AdmissionGate
    _departures: Departures
    _sharing: PrefixSharing | None
    _plan_cache: PlanCache
    _ring: PinnedRing | None
    _device_state: DeviceState | None

    @property
    def arena(self) -> PageArena:
        """Who owns which page."""
        self._departures.settle()
        return self._arena

    # State, by stream.

    @property
    def stored_len(self) -> np.ndarray:
        """Tokens stored, int64 [streams]."""
        self._departures.settle()
        return self._streams.stored_len

    @property
    def num_pages(self) -> np.ndarray:
        """Pages held, int64 [streams]."""
        self._departures.settle()
        return self._streams.num_pages

    @property
    def generation(self) -> np.ndarray:
        """Moves with every change of a stream's content, int64 [streams]."""
        self._departures.settle()
        return self._streams.generation

    @property
    def page_table(self) -> np.ndarray:
        """Pages in order, the sink page where none is held, int32 [streams, pages of max_seq_len]."""
        self._departures.settle()
        return self._streams.page_table

    def streams(self, rows: LabelRows) -> np.ndarray:
        """The streams int64 [n] of a step's rows under one label."""
        return self._streams.of(rows.label, rows.rows)

    def streams_of_rows(self, rows: np.ndarray) -> np.ndarray:
        """The streams of every label of master rows int64 [n]."""
        return self._streams.of_rows(rows)

    @property
    def plan_cache_stats(self) -> Counter[str]:
        return self._plan_cache.stats

    @property
    def counters(self) -> Counter[str]:
        """``pinned_takes``: index arrays that went through the page-locked ring.  ``ingraph_length_steps``: steps whose
        lengths moved on in the graph.  And those of the prefix index, as ``prefix_hits``, ``prefix_misses``,
        ``prefix_hit_tokens``, ``prefix_insertions``, ``prefix_evictions``."""
        self._departures.settle()
        counters = Counter(
            pinned_takes=0 if self._ring is None else self._ring.takes,
            ingraph_length_steps=0 if self._device_state is None else self._device_state.num_moved,
        )
        if self._sharing is not None:
            counters.update({f"prefix_{name}": n for name, n in self._sharing.index.counters.items()})
        return counters

    @property
    def prefixes(self) -> PrefixSharing | None:
        """What requests share; None without a prefix cache."""
        self._departures.settle()
        return self._sharing

    # Admission, asked by whoever lets requests in.

    @property
    def num_usable_pages(self) -> int:
        """Pages that streams can hold: all but the sink."""
        return self._arena.num_usable

    @property
    def free_pages(self) -> int:
        """Pages no stream holds now, those that only the prefix index holds included; some may be promised."""
        self._departures.settle()
        return self._arena.num_available

    @property
    def promised_pages(self) -> int:
        """Pages that running requests have reserved and do not hold yet."""
        self._departures.settle()
        return self._gate.promised

    @property
    def admission_fit(self) -> str:
        """ "sum", "peak" or "none", see :class:`PagedKVConfig`."""
        return self._gate.fit

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
        self._departures.settle()
        return self._gate.version

    def can_join(self, config: KVReqConfig) -> bool:
        """Whether a request may start now beside everything that running requests have reserved."""
        self._departures.settle()
        return self._gate.can_join(self._demand(config, self._lent_to(config)))

    def may_pass(self, config: KVReqConfig, head: KVReqConfig) -> bool:
        """Whether a request may start before ``head``, the first of the queue, which may not start now."""
        self._departures.settle()
        own, heads = (self._demand(each, self._lent_to(each)) for each in (config, head))
        return self._gate.may_pass(own, heads)

    def pages_for(self, tokens: int) -> int:
        """Pages of a stream of ``tokens``, cut to ``max_seq_len``."""
        return self._streams.pages_of(min(tokens, self.config.max_seq_len))

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether an otherwise empty pool holds a stream of ``tokens``."""
        return self.pages_for(tokens) <= self.num_usable_pages

    def _demand(self, config: KVReqConfig, lent: int) -> Demand:
        longest, labels = self.config.max_seq_len, len(config.all_labels)
        prompt = min(config.prompt_tokens, longest)
        if config.max_tokens is None:
            return Demand(prompt, 0, 0, labels)
        return Demand(prompt, min(config.prompt_tokens + config.max_tokens, longest), lent, labels)

    def _lent_to(self, config: KVReqConfig) -> int:
        """Pages out of the index that are in use already; a request that reserves nothing counts none."""
        if self._sharing is None or config.max_tokens is None:
            return 0
        return self._sharing.lent_to(config)
