"""What a model declares about token positions.  No kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep

if TYPE_CHECKING:
    from mstar.engine.resources.base import Resource


@dataclass(frozen=True)
class PositionConfig:
    """Sequential positions and their rotary embedding.

    ``rotary_dim`` (even; default the cache's head_dim) leading dims are rotated, the rest pass.  ``interleave`` pairs
    dims (0, 1), (2, 3), ...; otherwise dim i pairs with i + rotary_dim / 2.  ``rope_scaling``: None, or a mapping
    with ``rope_type`` (or ``type``) ``default``, ``linear`` (``factor``) or ``llama3`` (``factor``,
    ``low_freq_factor``, ``high_freq_factor``, ``original_max_position_embeddings``).
    """

    kv_cache: str = "kv_cache"
    rotary_dim: int | None = None
    rope_theta: float = 10000.0
    interleave: bool = False
    rope_scaling: dict[str, Any] | None = None


@dataclass(frozen=True)
class PositionSpec(NodeResourceSpec):
    """Positions of the named nodes' rows."""

    config: PositionConfig = field(default_factory=PositionConfig)

    def depends_on(self) -> tuple[str, ...]:
        return (self.config.kv_cache,)

    @property
    def resource_class(self) -> type[Resource]:
        from mstar.engine.resources.positions.manager import PositionManager

        return PositionManager


@dataclass(frozen=True)
class PositionStep(ResourceStep):
    """New tokens continue their row's positions.  ``advance``, one number per row, overrides how far each moves."""

    advance: tuple[int, ...] | None = None
