"""Whether a request fits the paged caches: ever, and beside what runs now."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol, runtime_checkable

from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.kv.config import KVReqConfig
from mstar.engine.resources.kv.prefix.sharing import PrefixSharing
from mstar.engine.resources.spec import ResourceReqConfig
from mstar.utils.errors import InvalidArgument


class _PagedConfig(Protocol):
    @property
    def page_size(self) -> int: ...


@runtime_checkable
class PagePool(Protocol):
    """A resource that holds a request's tokens in pages and reserves them when the request is ingested."""

    @property
    def config(self) -> _PagedConfig: ...

    @property
    def num_usable_pages(self) -> int: ...

    @property
    def free_pages(self) -> int: ...

    @property
    def promised_pages(self) -> int: ...

    @property
    def admission_fit(self) -> str: ...

    @property
    def admission_order(self) -> str: ...

    @property
    def backfill_window(self) -> int: ...

    @property
    def admission_version(self) -> Hashable: ...

    @property
    def prefixes(self) -> PrefixSharing | None: ...

    def pages_for(self, tokens: int) -> int: ...

    def can_ever_fit(self, tokens: int) -> bool: ...

    def can_join(self, config: KVReqConfig) -> bool: ...

    def may_pass(self, config: KVReqConfig, head: KVReqConfig) -> bool: ...


class Pools:
    """The page pools among an engine's resources, asked as one."""

    def __init__(self, resources: Mapping[str, object]) -> None:
        self._pools = {key: resource for key, resource in resources.items() if isinstance(resource, PagePool)}
        self._sharing = next((key for key, pool in self._pools.items() if pool.prefixes is not None), None)

    @property
    def capacity_tokens(self) -> int | None:
        """Longest stream that an empty engine holds; None without pools."""
        return min((pool.num_usable_pages * pool.config.page_size for pool in self._pools.values()), default=None)

    @property
    def may_run_out(self) -> bool:
        """Whether requests may join that do not find free all pages they may come to hold."""
        return any(pool.admission_fit != "sum" for pool in self._pools.values())

    def have_room(self, tokens: int, spare: int) -> bool:
        """Whether a stream of ``tokens`` fits now, beside what prompts that run are promised, and leaves ``spare``
        pages."""
        return all(pool.pages_for(tokens) + spare <= _unpromised(pool) for pool in self._pools.values())

    @property
    def num_pages(self) -> int:
        return sum(pool.num_usable_pages for pool in self._pools.values())

    @property
    def num_pages_used(self) -> int:
        return sum(pool.num_usable_pages - pool.free_pages for pool in self._pools.values())

    @property
    def window(self) -> int:
        """How many of those that wait longest may be let in: 1, the head, where one pool keeps to their order."""
        return min((_window(pool) for pool in self._pools.values()), default=1)

    @property
    def version(self) -> Hashable:
        """Changes when a pool that refused somebody may answer otherwise."""
        return tuple(pool.admission_version for pool in self._pools.values())

    @property
    def prefixes(self) -> PrefixSharing | None:
        """What requests share, of the first pool with a prefix cache; None where none has one."""
        return None if self._sharing is None else self._pools[self._sharing].prefixes

    def prefix_config(self, info: RequestInfo) -> KVReqConfig:
        """What that pool knows of a request."""
        assert self._sharing is not None
        return _of(info.resource_configs, self._sharing)

    def prefix_tokens(self, num_pages: int) -> int:
        """Tokens in so many pages of that pool."""
        assert self._sharing is not None
        return num_pages * self._pools[self._sharing].config.page_size

    def check_can_ever_fit(self, prompt_tokens: int, max_tokens: int) -> None:
        """Refuses what would not fit an empty pool.

        Raises:
            InvalidArgument: with the pages there are and the pages it would need.
        """
        total = prompt_tokens + max_tokens
        for pool in self._pools.values():
            if not pool.can_ever_fit(total):
                allowed = (
                    f"prompt and output within the KV cache of {pool.num_usable_pages} pages "
                    f"of {pool.config.page_size} tokens"
                )
                need = f"{prompt_tokens} + {max_tokens} tokens = {pool.pages_for(total)} pages"
                raise InvalidArgument("max_tokens", allowed, need)

    def can_join(self, configs: Mapping[str, ResourceReqConfig]) -> bool:
        """Whether a request of these parameters may run beside everything that runs now."""
        return all(pool.can_join(_of(configs, key)) for key, pool in self._pools.items())

    def may_pass(self, configs: Mapping[str, ResourceReqConfig], head: Mapping[str, ResourceReqConfig]) -> bool:
        """Whether it may do so before ``head``, which waits longer and cannot join yet, at no cost to it."""
        return all(pool.may_pass(_of(configs, key), _of(head, key)) for key, pool in self._pools.items())


def _unpromised(pool: PagePool) -> int:
    """Free pages less what prompts that run still take; other pools promise also what may never be taken."""
    return pool.free_pages - (pool.promised_pages if pool.admission_fit == "none" else 0)


def _window(pool: PagePool) -> int:
    return max(pool.backfill_window, 1) if pool.admission_order == "backfill" else 1


def _of(configs: Mapping[str, ResourceReqConfig], key: str) -> KVReqConfig:
    config = configs[key]
    assert isinstance(config, KVReqConfig)
    return config
