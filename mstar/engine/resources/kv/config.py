"""What a model declares about its KV cache.  No kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import ResourceStep
from mstar.utils.errors import shorten

if TYPE_CHECKING:
    from mstar.engine.resources.base import Resource

NUM_RESERVED_PAGES = 1  # page 0, the sink of all padding writes


@dataclass(frozen=True, kw_only=True)
class PagedKVConfig:
    """Shape of a paged cache.

    ``num_qo_heads`` defaults to ``num_kv_heads``.  ``max_seq_len`` is the longest stream in tokens, ``page_size`` is
    in tokens, ``max_num_pages`` counts the sink page.

    Raises:
        ValueError: a number below 1 (``max_num_pages``: below 2), or query heads that kv heads do not divide.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    num_qo_heads: int = 0
    max_num_pages: int = 2048
    page_size: int = 128

    def __post_init__(self) -> None:
        if self.num_qo_heads == 0:
            object.__setattr__(self, "num_qo_heads", self.num_kv_heads)
        for field in fields(self):
            value = getattr(self, field.name)
            low = 1 + NUM_RESERVED_PAGES if field.name == "max_num_pages" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{field.name} must be an integer >= {low}, got {shorten(value)}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(f"num_qo_heads={self.num_qo_heads} is no multiple of num_kv_heads={self.num_kv_heads}")

    @property
    def max_pages_per_row(self) -> int:
        """Pages of a stream of ``max_seq_len`` tokens."""
        return -(-self.max_seq_len // self.page_size)

    def page_bytes(self, element_size: int) -> int:
        """Bytes one page takes over all layers, keys and values, at ``element_size`` bytes an element."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * element_size


@dataclass(frozen=True)
class PagedKVSpec(NodeResourceSpec):
    """A paged KV cache shared by the named nodes."""

    config: PagedKVConfig

    @property
    def resource_class(self) -> type[Resource]:
        from mstar.engine.resources.kv.manager import PagedKVManager

        return PagedKVManager

    def apply_yaml_overrides(self, **overrides: Any) -> PagedKVSpec:
        return replace(self, config=replace(self.config, **overrides))


@dataclass(frozen=True)
class KVStep(ResourceStep):
    """Appends each segment's tokens.  With ``commit`` False they are written but the stream's length stays."""

    commit: bool = True


@dataclass
class KVReqConfig(ResourceReqConfig):
    """What one request may come to hold: ``prompt_tokens + max_tokens``, cut to the cache's ``max_seq_len``.

    ``max_tokens`` None reserves nothing.
    """

    prompt_tokens: int = 0
    max_tokens: int | None = None
