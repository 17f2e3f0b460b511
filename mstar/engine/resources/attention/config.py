"""What a model declares about attention.  No kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep
from mstar.utils.errors import shorten

if TYPE_CHECKING:
    from mstar.engine.resources.base import Resource


class AttentionBackend(StrEnum):
    """SDPA: torch's scaled-dot-product attention over gathered pages, on any device, planned on the host.
    FLASHINFER: its paged kernels, on CUDA.  TRITON: kernels of our own that take lengths and pages from the device;
    on the CPU their torch references.
    """

    SDPA = "SDPA"
    FLASHINFER = "FLASHINFER"
    TRITON = "TRITON"


@dataclass(frozen=True)
class AttentionConfig:
    """``kv_cache`` is the key of the paged cache; ``sliding_window`` counts tokens, the token itself included.

    ``deterministic``: a token's result depends on its own keys alone, to the bit, whatever else is in the batch and
    however its prompt was cut.

    Raises:
        ValueError: an unknown backend, or a window that is no integer >= 1.
    """

    kv_cache: str = "kv_cache"
    backend: AttentionBackend | str = AttentionBackend.SDPA
    sliding_window: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.backend not in list(AttentionBackend):
            known = ", ".join(AttentionBackend)
            raise ValueError(f"attention backend must be one of {known}, got {shorten(self.backend)}")
        object.__setattr__(self, "backend", AttentionBackend(self.backend))
        window = self.sliding_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ValueError(f"sliding_window must be an integer >= 1, got {shorten(window)}")


@dataclass(frozen=True)
class AttentionSpec(NodeResourceSpec):
    """Attention of the named nodes over one paged cache."""

    config: AttentionConfig = AttentionConfig()

    def depends_on(self) -> tuple[str, ...]:
        return (self.config.kv_cache,)

    @property
    def resource_class(self) -> type[Resource]:
        from mstar.engine.resources.attention.manager import AttentionManager

        return AttentionManager

    def apply_yaml_overrides(self, **overrides: Any) -> AttentionSpec:
        return replace(self, config=replace(self.config, **overrides))


@dataclass(frozen=True)
class AttentionStep(ResourceStep):
    """Queries over the planned rows of the cache.

    ``causal`` False lets each query see every token of its row.  Segments of its own say how many queries a label's
    rows have, where that is not one for each new token: a label that the cache only reads (span 0) still has queries
    here.  They name the label's requests in the cache step's order.
    """

    causal: bool = True
