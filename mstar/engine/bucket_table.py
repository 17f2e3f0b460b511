"""The buckets a node declares: enumeration, and the choice of the tightest for a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

from mstar.engine.accelerator_graph_config import AcceleratorGraphConfig, AcceleratorGraphConfigType
from mstar.engine.resources.step import BucketKey, SlotLease

DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_MOST_SELECTED = 4096


@dataclass(frozen=True)
class CGSlotSpec:
    """One capture to make: a bucket on one slot."""

    bucket: BucketKey
    slot: int
    config: AcceleratorGraphConfig
    config_idx: int


class BucketTable:
    """Every bucket of a node's configurations (``specs``, largest first), and those ``registered`` for replays."""

    def __init__(self, node: str, configs: Sequence[AcceleratorGraphConfig], num_slots: int) -> None:
        """Raises ValueError when two configurations capture one bucket."""
        self.node = node
        self.num_slots = num_slots
        self.unavailable: str | None = "not_warmed_up"  # why nothing at all is registered
        self._configs = list(configs)
        self.specs = sorted(self._enumerate(), key=lambda s: (-s.bucket.bs, -s.bucket.num_tokens))
        self._config_of = {spec.bucket: (spec.config_idx, spec.config) for spec in self.specs}
        self.registered = ()

    @property
    def buckets(self) -> list[BucketKey]:
        """Every declared bucket, largest first."""
        return list(self._config_of)

    @property
    def registered(self) -> Collection[BucketKey]:
        """Buckets that steps may be served by."""
        return self._registered

    @registered.setter
    def registered(self, buckets: Collection[BucketKey]) -> None:
        self._registered = buckets
        self._selected: dict[tuple[str, int, int, Hashable | None, bool], BucketKey | None] = {}  # by what was asked
        # By walk and key, ascending: a step of a changed batch looks for its bucket, among hundreds on a CPU.
        self._ascending: dict[tuple[str, Hashable | None], list[BucketKey]] = {}
        for bucket in sorted(buckets, key=_size):
            for walk in dict.fromkeys(_walks(self._config_of[bucket][1])):
                self._ascending.setdefault((walk, bucket.cg_key_info), []).append(bucket)

    def select_bucket(
        self,
        graph_walk: str,
        bs: int,
        num_tokens: int,
        key_info: Hashable | None = None,
        equal_rows: bool = True,
    ) -> BucketKey | None:
        """The tightest bucket, by (tokens, rows), that holds ``bs`` rows of ``num_tokens`` input tokens in all.

        ``equal_rows``: the rows have one length; a batched bucket takes no others, and only its template's.
        """
        asked = (graph_walk, bs, num_tokens, key_info, equal_rows)
        if asked not in self._selected:
            if len(self._selected) >= _MOST_SELECTED:
                self._selected.clear()
            self._selected[asked] = self._tightest(*asked)
        return self._selected[asked]

    def _tightest(
        self, graph_walk: str, bs: int, num_tokens: int, key_info: Hashable | None, equal_rows: bool
    ) -> BucketKey | None:
        ascending = self._ascending.get((graph_walk, key_info), [])
        for i in range(bisect_left(ascending, (num_tokens, bs), key=_size), len(ascending)):
            if self._fits(ascending[i], graph_walk, bs, num_tokens, key_info, equal_rows):
                return ascending[i]
        return None

    def select_batched_bucket(self, graph_walk: str, bs: int, key_info: Hashable | None = None) -> BucketKey | None:
        """The tightest bucket of equal rows, by (rows, tokens), when inputs are not prepared yet."""
        return min(
            (
                k
                for k in self.registered
                if self._serves(k, graph_walk, key_info) and k.bs >= bs and not self._is_packed(k)
            ),
            key=lambda k: (k.bs, k.num_tokens),
            default=None,
        )

    def lease_slot(
        self,
        graph_walk: str,
        bs: int,
        slot: int,
        num_tokens: int | None = None,
        key_info: Hashable | None = None,
        equal_rows: bool = True,
    ) -> SlotLease | None:
        """A lease of ``slot`` (modulo the number of slots) of the tightest bucket; None means eager."""
        if num_tokens is None:
            bucket = self.select_batched_bucket(graph_walk, bs, key_info)
        else:
            bucket = self.select_bucket(graph_walk, bs, num_tokens, key_info, equal_rows)
        return None if bucket is None else SlotLease(slot % self.num_slots, bucket)

    def eager_reason(
        self, graph_walk: str, bs: int, num_tokens: int, key_info: Hashable | None, equal_rows: bool
    ) -> str:
        """Why :meth:`select_bucket` finds nothing: the label of the eager-step counter."""
        keys = [key for key, (_, config) in self._config_of.items() if graph_walk in _walks(config)]
        if not keys:
            return "no_capture"
        if self.unavailable is not None:
            return self.unavailable
        keys = [key for key in keys if key.cg_key_info == key_info]
        if not keys:
            return "key_info"
        if any(self._fits(key, graph_walk, bs, num_tokens, key_info, equal_rows) for key in keys):
            return "dropped"
        keys = [key for key in keys if key.bs >= bs]
        if not keys:
            return "batch_size"
        return "tokens" if any(self._is_packed(key) for key in keys) else "row_length"

    def max_batch_size_for(self, graph_walk: str) -> int | None:
        """Largest captured batch of the configurations that serve this walk and cap it; None when none does."""
        caps = [max(batch_sizes(c)) for c in self._configs if c.caps_eager_batch_size and graph_walk in _walks(c)]
        return max(caps, default=None)

    def packed_sizes_for(self, graph_walk: str) -> tuple[int, ...]:
        """Input tokens that packed buckets of this walk hold, ascending; empty when none serves it."""
        lengths = {
            key.num_tokens // _multiplier(config)
            for key, (_, config) in self._config_of.items()
            if self._is_packed(key) and graph_walk in _walks(config)
        }
        return tuple(sorted(lengths))

    def _fits(
        self, key: BucketKey, walk: str, bs: int, num_tokens: int, key_info: Hashable | None, equal_rows: bool
    ) -> bool:
        config = self._config_of[key][1]
        if key.bs < bs or num_tokens * _multiplier(config) > key.num_tokens or not self._serves(key, walk, key_info):
            return False
        if self._is_packed(key):
            return True
        # An equal split of the bucket's own tokens over its rows is the template's length.
        return equal_rows and num_tokens * _multiplier(config) * key.bs == key.num_tokens * bs

    def _serves(self, key: BucketKey, walk: str, key_info: Hashable | None) -> bool:
        return key.cg_key_info == key_info and walk in _walks(self._config_of[key][1])

    def _is_packed(self, key: BucketKey) -> bool:
        return self._config_of[key][1].get_config_type() is AcceleratorGraphConfigType.FLASH_INFER_PACKED

    def _enumerate(self) -> Iterator[CGSlotSpec]:
        seen: dict[BucketKey, int] = {}
        for idx, config in enumerate(self._configs):
            for bs in batch_sizes(config):
                for num_tokens in dict.fromkeys(config.get_total_tokens(bs)):
                    key = BucketKey(config.capture_graph_walk, bs, num_tokens, config.additional_key_info)
                    if seen.setdefault(key, idx) != idx:
                        raise ValueError(f"{self.node}: configurations {seen[key]} and {idx} both capture {key}")
                    for slot in range(self.num_slots):
                        yield CGSlotSpec(key, slot, config, idx)


def _size(bucket: BucketKey) -> tuple[int, int]:
    return bucket.num_tokens, bucket.bs


def batch_sizes(config: AcceleratorGraphConfig) -> list[int]:
    """The configuration's batch sizes, ascending, each once."""
    return sorted(set(config.capture_batch_sizes or DEFAULT_BATCH_SIZES))


def _walks(config: AcceleratorGraphConfig) -> tuple[str, ...]:
    return (config.capture_graph_walk, *(config.replay_graph_walks or ()))


def _multiplier(config: AcceleratorGraphConfig) -> int:
    return getattr(config, "total_tokens_multiplier", 1)
