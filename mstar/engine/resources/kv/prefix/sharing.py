"""Requests and the prefix index: what a prompt finds there, and what its stream leaves there."""

from __future__ import annotations

from typing import Self

import numpy as np

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.kv.config import KVReqConfig, PagedKVConfig
from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.prefix.chains import PrefixChains
from mstar.engine.resources.kv.prefix.coming import Coming
from mstar.engine.resources.kv.prefix.index import PrefixIndex, PrefixMatch
from mstar.engine.resources.kv.prefix.keys import prefix_root
from mstar.engine.resources.kv.streams import Streams
from mstar.engine.resources.step import MAIN_LABEL
from mstar.utils import knobs


class PrefixSharing:
    """Streams "main" of requests that share: a request is matched once, starts on the matched pages, and its own full
    pages are offered to the index as they are committed.

    Streams of this label have the numbers of their master rows.  A match is leased from :meth:`resolve` until
    :meth:`apply` makes its pages the stream's.
    """

    def __init__(self, index: PrefixIndex, chains: PrefixChains, streams: Streams, page_size: int) -> None:
        self.index = index
        self.chains = chains
        self._streams = streams
        self._page_size = page_size
        self._configs: dict[int, KVReqConfig] = {}
        self._matches: dict[int, PrefixMatch] = {}
        self._leased: set[int] = set()
        self._is_due = False

    @classmethod
    def of_cache(cls, config: PagedKVConfig, info: EngineResourceInfo, arena: PageArena, streams: Streams) -> Self:
        """What the requests of one cache share."""
        root = prefix_root(
            checkpoint="",  # an index lives no longer than its engine, which has one
            config=f"{config.num_layers} {config.num_kv_heads} {config.head_dim}",
            layout=config.layout,
            page_size=config.page_size,
            dtype=str(info.kv_dtype),
            world_size=config.num_shards,
            salt=config.prefix_cache_salt,
        )
        index = PrefixIndex(arena, config.page_size, root)
        chains = PrefixChains(
            index, config.page_size, info.total_rows, config.max_pages_per_row, knobs.kv_chain_lazy_steps()
        )
        return cls(index, chains, streams, config.page_size)

    def ingest(self, request_id: int, config: KVReqConfig) -> None:
        """Takes a request, unless it doesn't share."""
        if _shares(config):
            self._configs[request_id] = config

    def shares(self, request_id: int) -> bool:
        return request_id in self._configs

    def lent_to(self, config: KVReqConfig) -> int:
        """Pages that the request would get out of the index and that others hold already."""
        if not _shares(config):
            return 0
        return self.index.num_in_use(self.index.find(*self._prompt(config)))

    def coming(self, config: KVReqConfig, row: int = -1) -> Coming | None:
        """The pages behind those indexed that another request is about to bring; ``row``: its own, once it has one."""
        if not (len(self.chains.coming) and _shares(config)):
            return None
        ids, keys = self._prompt(config)
        num_usable, found = max(len(ids) - 1, 0) // self._page_size, 0
        while found < num_usable and self.index.holds(keys[found]):
            found += 1
        return self.chains.coming.run(keys[:num_usable], found, row)

    def row_bringing(self, key: bytes) -> int | None:
        """The master row of the request that is about to bring the page of this key; None once it has, or has left."""
        return self.chains.coming.stream_of(key)

    def middle_key(self, config: KVReqConfig) -> bytes | None:
        """The key of the last page within the first half of the prompt, which is indexed if at least the half is; None
        where that is no page."""
        num_pages = config.prompt_tokens // (2 * self._page_size)
        return self._prompt(config)[1][num_pages - 1] if num_pages and _shares(config) else None

    def resolve(self, request_id: int) -> int:
        """Leading tokens of the prompt that are indexed, now leased; asked again, it answers the same."""
        match = self._matches.get(request_id)
        if match is None:
            match = self._match(self._configs[request_id])
            self.index.lease(match)
            self._matches[request_id] = match
            self._leased.add(request_id)
        return match.num_pages * self._page_size

    def apply(self, request_id: int, row: int, matched_len: int) -> None:
        """Starts the request's stream on the first ``matched_len`` tokens of its match, a multiple of the page size."""
        if request_id not in self._leased:
            return
        assert matched_len % self._page_size == 0, "a part of a shared page cannot be written behind"
        self._leased.remove(request_id)
        match = self._matches[request_id] = self.index.trim(self._matches[request_id], matched_len // self._page_size)
        if matched_len:
            assert self._streams.num_pages[row] == 0, "a prefix is applied to a stream that has begun"
            self._streams.put_in(row, match.pages, matched_len)
        config = self._configs[request_id]
        assert config.prompt_ids is not None
        self.chains.begin(row, config.prompt_ids, match, config.prefix_items)

    def extend(self, streams: np.ndarray, tokens: np.ndarray) -> None:
        """Kept tokens int64 [n], one for each of ``streams`` int64 [n]."""
        self._is_due |= self.chains.extend(streams, tokens)

    def flush(self) -> None:
        """Adds all kept tokens to their chains.  Idempotent."""
        self.chains.flush_chain_backlog()
        self._is_due = True

    def committed(self, streams: np.ndarray, is_decode: bool) -> None:
        """Streams of "main" int64 [n] that a commit has made longer.

        Streams behind their prompts only when chains have got longer since the last time: most of a step's cost here
        is to find out that nothing new can be offered.
        """
        if not is_decode:
            in_prompt = self.chains.in_prompt(streams)
            if not self._is_due:
                streams = streams[in_prompt]
            is_decode = np.count_nonzero(in_prompt) < in_prompt.size  # of some
        elif not self._is_due:
            return
        self._is_due = self._is_due and not is_decode
        if streams.size:
            self.chains.committed(streams, self._streams.stored_len[streams], self._streams.page_table)

    def leave(self, request_id: int) -> None:
        """The request goes; its row's chain stays until :meth:`end`."""
        match = self._matches.pop(request_id, None)
        if request_id in self._leased and match is not None:
            self._leased.remove(request_id)
            self.index.release(match)
        self._configs.pop(request_id, None)

    def end(self, rows: np.ndarray) -> None:
        """Offers what the streams of ``rows`` int64 [n] have committed for the last time, and ends their chains."""
        self.chains.flush(rows)
        self.chains.committed(rows, self._streams.stored_len[rows], self._streams.page_table)
        for row in rows.tolist():
            self.chains.end(row)

    def end_one(self, row: int) -> None:
        """:meth:`end` of one row."""
        self.chains.complete(row, self._streams.stored_len.item(row), self._streams.page_table[row])

    def _match(self, config: KVReqConfig) -> PrefixMatch:
        """What of the prompt is indexed now."""
        return self.index.match_keys(*self._prompt(config), config.prefix_salt)

    def _prompt(self, config: KVReqConfig) -> tuple[np.ndarray, list[bytes]]:
        """The prompt's ids and keys; hashed once, however often a waiting request asks."""
        assert config.prompt_ids is not None
        if config.prefix_keys is None:
            config.prefix_keys = self.index.keys(config.prompt_ids, config.prefix_items, config.prefix_salt)[1]
        return config.prompt_ids, config.prefix_keys

    def leased_pages(self) -> list[np.ndarray]:
        """Pages owned by leases that were not applied."""
        return [self._matches[request_id].pages for request_id in self._leased]


def _shares(config: KVReqConfig) -> bool:
    """Not without ids, against the request's own wish, or with labels besides "main"."""
    return config.use_prefix_cache and config.prompt_ids is not None and config.all_labels == (MAIN_LABEL,)
