"""What a model declares about its KV cache.  No kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import MAIN_LABEL, ResourceStep
from mstar.utils import knobs
from mstar.utils.errors import shorten

if TYPE_CHECKING:
    import numpy as np

    from mstar.engine.resources.base import Resource
    from mstar.engine.resources.kv.prefix.keys import PrefixItem

NUM_RESERVED_PAGES = 1  # page 0, the sink of all padding writes

_LEAST = {"max_num_pages": 1 + NUM_RESERVED_PAGES, "cpu_offload_pages": 0}
_CHOICES = {
    "layout": ("NHD",),
    "admission_fit": ("sum", "peak", "none"),
    "admission_order": ("fifo", "backfill"),
    "backfill_protect": ("easy",),
}


@dataclass(frozen=True, kw_only=True)
class PagedKVConfig:
    """Shape and policies of a paged cache.

    ``num_qo_heads`` defaults to ``num_kv_heads``.  ``max_seq_len`` is the longest stream in tokens, ``page_size`` is
    in tokens, ``max_num_pages`` counts the sink page; ``cpu_offload_pages`` is the size of the host pool, 0 for none.
    ``prefix_cache_salt`` keeps this cache's prefixes apart from those of equal models.

    ``admission_fit`` says what a joining request must find: "sum" every page that it and the running requests may
    come to hold; "peak" the highest number they hold at one time; "none" its prompt's pages.  ``admission_order``:
    "fifo", or "backfill", where any of the ``backfill_window`` first waiting requests may pass the head of the queue
    if the head starts no later for it (``backfill_protect`` "easy", the only rule).

    Raises:
        ValueError: a number below its least value, an unknown policy, or query heads that kv heads do not divide.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    num_qo_heads: int = 0
    max_num_pages: int = 2048
    page_size: int = 128
    layout: str = "NHD"
    cpu_offload_pages: int = 0
    prefix_cache: bool = True
    prefix_cache_salt: str = ""
    admission_fit: str = "sum"
    admission_order: str = "fifo"
    backfill_protect: str = "easy"
    backfill_window: int = 128
    num_shards: int = 1

    def __post_init__(self) -> None:
        if self.num_qo_heads == 0:
            object.__setattr__(self, "num_qo_heads", self.num_kv_heads)
        for setting in fields(self):
            value = getattr(self, setting.name)
            choices = _CHOICES.get(setting.name)
            if choices is not None:
                if not isinstance(value, str) or value not in choices:
                    raise ValueError(f"{setting.name} must be one of {', '.join(choices)}, got {shorten(value)}")
            elif isinstance(setting.default, bool | str):
                if type(value) is not type(setting.default):
                    raise ValueError(f"{setting.name} must be a {type(setting.default).__name__}, got {shorten(value)}")
            else:
                low = _LEAST.get(setting.name, 1)
                if isinstance(value, bool) or not isinstance(value, int) or value < low:
                    raise ValueError(f"{setting.name} must be an integer >= {low}, got {shorten(value)}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(f"num_qo_heads={self.num_qo_heads} is no multiple of num_kv_heads={self.num_kv_heads}")

    @property
    def max_pages_per_row(self) -> int:
        """Pages of a stream of ``max_seq_len`` tokens."""
        return -(-self.max_seq_len // self.page_size)

    def page_bytes(self, element_size: int) -> int:
        """Bytes one page takes over all layers, keys and values, at ``element_size`` bytes an element."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * element_size

    def shard(self, n: int) -> PagedKVConfig:
        """One of ``n`` ranks' part of the heads.  Kv heads fewer than ranks are replicated.  Idempotent.

        Raises:
            ValueError: heads that do not divide exactly, or a config already sharded another way.
        """
        if n == self.num_shards:
            return self
        if self.num_shards != 1:
            raise ValueError(f"the cache is sharded {self.num_shards} ways already, not {n}")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"shards must be an integer >= 1, got {shorten(n)}")
        kv_heads, qo_heads = self.num_kv_heads, self.num_qo_heads
        if qo_heads % n or max(n, kv_heads) % min(n, kv_heads):
            raise ValueError(f"num_qo_heads={qo_heads} and num_kv_heads={kv_heads} do not divide over {n} shards")
        return replace(self, num_shards=n, num_qo_heads=qo_heads // n, num_kv_heads=max(kv_heads // n, 1))

    def with_environment(self) -> PagedKVConfig:
        """This config under MSTAR_KV_ADMISSION_FIT, MSTAR_KV_ADMISSION_ORDER and MSTAR_KV_BACKFILL_WINDOW, which win.

        Raises:
            ValueError: a malformed variable, by name.
        """
        found = {
            "admission_fit": knobs.kv_admission_fit(),
            "admission_order": knobs.kv_admission_order(),
            "backfill_window": knobs.kv_backfill_window(),
        }
        overrides: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
        return replace(self, **overrides) if overrides else self


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
class Fork:
    """Stream ``target`` of a request becomes a copy of its stream ``source``, in pages of its own."""

    request_id: int
    source: str
    target: str

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ValueError(f"a fork's target must be another label than its source {self.source!r}")


@dataclass(frozen=True)
class Retention:
    """Bounds what a stream keeps: its first ``protected_tokens`` and its last ``keep_tokens``, in whole pages.

    Pages that lie between are released at commit.  Tokens behind them keep their positions.
    """

    protected_tokens: int
    keep_tokens: int

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{entry.name} must be an integer >= 0, got {shorten(value)}")


@dataclass(frozen=True)
class KVStep(ResourceStep):
    """Appends each segment's tokens to its stream; a segment of span 0 reads the stream and leaves it as it is.

    With ``commit`` False tokens are written but no stream gets longer.  ``combined_labels`` maps source labels to the
    label under which they are planned as one, end to end; a source isn't planned alone.  ``pre_forks`` happen before
    the step's tokens are written, ``post_forks`` after its commit; both in order.
    """

    commit: bool = True
    combined_labels: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    pre_forks: tuple[Fork, ...] = ()
    post_forks: tuple[Fork, ...] = ()
    retention: Retention | None = None


@dataclass
class KVReqConfig(ResourceReqConfig):
    """What one request may come to hold, and what of it may be shared.

    Each of its labels may grow to ``prompt_tokens + max_tokens`` tokens, cut to the cache's ``max_seq_len``;
    ``max_tokens`` None reserves nothing.  ``needed_labels`` names the labels that a step of (node, walk), of a node,
    or (key None) of any node reads; "main" where none of them is given.

    ``prompt_ids`` int64 [prompt_tokens] are the prompt's tokens, None when there are no such ids.  ``prefix_items``
    are the inputs other than tokens that the prompt holds.  Prompts share pages only under equal ``prefix_salt``, and
    not at all unless ``use_prefix_cache``.  The cache fills in ``prefix_keys``, those
    of the prompt's full pages.
    """

    prompt_tokens: int = 0
    max_tokens: int | None = None
    needed_labels: Mapping[tuple[str, str] | str | None, tuple[str, ...]] = field(default_factory=dict)
    prompt_ids: np.ndarray | None = None
    prefix_items: tuple[PrefixItem, ...] = ()
    prefix_salt: str = ""
    use_prefix_cache: bool = True
    prefix_keys: list[bytes] | None = field(default=None, init=False, repr=False, compare=False)

    def labels_of(self, node: str, graph_walk: str) -> tuple[str, ...]:
        """The labels that a step of this node and walk reads."""
        for key in ((node, graph_walk), node, None):
            if key in self.needed_labels:
                return self.needed_labels[key]
        return (MAIN_LABEL,)

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every label that some step reads, each once."""
        if not self.needed_labels:
            return (MAIN_LABEL,)
        named = (label for labels in self.needed_labels.values() for label in labels)
        return tuple(dict.fromkeys(named)) or (MAIN_LABEL,)
