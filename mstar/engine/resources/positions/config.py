"""What a model declares about token positions.  No kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mstar.engine.resources.kv.config import Fork
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep
from mstar.utils.errors import shorten

if TYPE_CHECKING:
    import torch

    from mstar.engine.resources.base import Resource


class PositionScheme(StrEnum):
    """SEQUENTIAL: a segment's tokens follow each other.  BLOCK: all of them stand at one position."""

    SEQUENTIAL = "sequential"
    BLOCK = "block"


@dataclass(frozen=True)
class PositionConfig:
    """Positions of a node's tokens, and the rotary embedding that turns queries and keys by them.

    ``kv_cache`` is the key of the paged cache, whose plan gives rows and order.  A segment moves its counter by its
    span under SEQUENTIAL, by ``block_step`` (if it has tokens) under BLOCK, unless the step overrides it.

    ``rotary_dim`` (even; default the cache's head_dim) leading dims are rotated, the rest pass.  ``interleave`` pairs
    dims (0, 1), (2, 3), ...; otherwise dim i pairs with i + rotary_dim / 2.  Pair i turns by
    ``position / rope_scale * rope_theta ** (-2 i / rotary_dim)``.  ``rope_dtype`` is what tables are stored and
    rotations computed in, by default the forward's dtype.

    ``rope_scaling``: None, or a mapping with ``rope_type`` (or ``type``) and its numbers:

    - ``default``;
    - ``linear``: ``factor``;
    - ``dynamic``: ``factor``, ``original_max_position_embeddings``; a row's theta follows its own length;
    - ``llama3``: the same, ``low_freq_factor``, ``high_freq_factor``;
    - ``yarn``: ``factor``, ``original_max_position_embeddings``, and optionally ``attention_factor``, ``beta_fast``,
      ``beta_slow``, ``mscale``, ``mscale_all_dim``, ``truncate``.

    ``mrope_section``, pairs per axis (time, height, width; they sum to rotary_dim / 2), makes positions three-fold.
    ``mrope_interleaved`` deals the pairs out in turn instead of one axis after the other.

    Raises:
        ValueError: a setting outside its range; names it.
    """

    kv_cache: str = "kv_cache"
    scheme: PositionScheme | str = PositionScheme.SEQUENTIAL
    block_step: int = 1
    rotary_dim: int | None = None
    interleave: bool = False
    rope_scale: float = 1.0
    rope_theta: float = 10000.0
    rope_dtype: torch.dtype | None = None
    rope_scaling: Mapping[str, Any] | None = None
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        if self.scheme not in list(PositionScheme):
            raise ValueError(f"scheme must be one of {', '.join(PositionScheme)}, got {shorten(self.scheme)}")
        object.__setattr__(self, "scheme", PositionScheme(self.scheme))
        if not _is_int(self.block_step) or self.block_step < 1:
            raise ValueError(f"block_step must be an integer >= 1, got {shorten(self.block_step)}")
        for name in ("rope_scale", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number > 0, got {shorten(value)}")
        section = self.mrope_section
        if section is not None:
            if len(section) != 3 or not all(_is_int(pairs) and pairs >= 0 for pairs in section):
                raise ValueError(f"mrope_section must be three integers >= 0, got {shorten(section)}")
            object.__setattr__(self, "mrope_section", tuple(section))


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

    def apply_yaml_overrides(self, **overrides: Any) -> PositionSpec:
        return replace(self, config=replace(self.config, **overrides))


@dataclass(frozen=True)
class PositionStep(ResourceStep):
    """New tokens continue their stream's positions.

    ``pos_ids`` gives them instead, one id per token of the plan in its order, padding rows' tokens included: int64
    [n], or [3, n] where positions are three-fold; by plan label, or one tensor when a single label is planned.
    ``advance``, one number per segment (per row without segments), overrides how far each counter moves at commit.
    Forks copy the source label's counter to the target's, as the KV step's copy its tokens: ``pre_forks`` before the
    step, ``post_forks`` after its commit.
    """

    pos_ids: torch.Tensor | Mapping[str, torch.Tensor] | None = None
    advance: tuple[int, ...] | None = None
    pre_forks: tuple[Fork, ...] = ()
    post_forks: tuple[Fork, ...] = ()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
