"""Whether a request fits the paged caches: ever, and beside what runs now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

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

    def pages_for(self, tokens: int) -> int: ...

    def can_ever_fit(self, tokens: int) -> bool: ...

    def fits_now(self, tokens: int) -> bool: ...


class Pools:
    """The page pools among an engine's resources, asked as one."""

    def __init__(self, resources: Iterable[object]) -> None:
        self._pools = [resource for resource in resources if isinstance(resource, PagePool)]

    @property
    def capacity_tokens(self) -> int | None:
        """Longest stream that an empty engine holds; None without pools."""
        return min((pool.num_usable_pages * pool.config.page_size for pool in self._pools), default=None)

    @property
    def num_pages(self) -> int:
        return sum(pool.num_usable_pages for pool in self._pools)

    @property
    def num_pages_used(self) -> int:
        return sum(pool.num_usable_pages - pool.free_pages for pool in self._pools)

    def check_can_ever_fit(self, prompt_tokens: int, max_tokens: int) -> None:
        """Refuses what would not fit an empty pool.

        Raises:
            InvalidArgument: with the pages there are and the pages it would need.
        """
        total = prompt_tokens + max_tokens
        for pool in self._pools:
            if not pool.can_ever_fit(total):
                allowed = (
                    f"prompt and output within the KV cache of {pool.num_usable_pages} pages "
                    f"of {pool.config.page_size} tokens"
                )
                need = f"{prompt_tokens} + {max_tokens} tokens = {pool.pages_for(total)} pages"
                raise InvalidArgument("max_tokens", allowed, need)

    def fits_now(self, tokens: int) -> bool:
        return all(pool.fits_now(tokens) for pool in self._pools)
