"""What a model declares about changes to its logits before they are sampled: spec, per-request config, step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import ResourceStep

if TYPE_CHECKING:
    from mstar.engine.resources.base import Resource


def _no_ids() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class LogitEditsSpec(NodeResourceSpec):
    """Changes to logits of width ``vocab_size``."""

    vocab_size: int

    @property
    def resource_class(self) -> type[Resource]:
        from mstar.engine.resources.logit_edits.manager import LogitEdits

        return LogitEdits


@dataclass(frozen=True, eq=False)
class LogitEditsReqConfig(ResourceReqConfig):
    """What is changed for one request; everything is off by default.

    ``allowed_ids`` int64, the only ids that may be drawn, empty for all.  ``bad_words``: sequences of ids, none of
    which generated tokens may complete.  ``stop_ids`` int64 cannot be drawn before ``min_tokens`` tokens exist, unless
    nothing else is left.
    ``bias_ids`` int64 and ``bias`` float32: what is added to these ids' logits.  ``presence_penalty`` is taken off
    every token generated so far, ``frequency_penalty`` once per time it was.
    """

    allowed_ids: np.ndarray = field(default_factory=_no_ids)
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_ids: np.ndarray = field(default_factory=_no_ids)
    min_tokens: int = 0
    bias_ids: np.ndarray = field(default_factory=_no_ids)
    bias: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def needs_full_variant(self) -> bool:
        return bool(
            self.allowed_ids.size
            or self.bad_words
            or (self.stop_ids.size and self.min_tokens)
            or self.bias_ids.size
            or self.presence_penalty
            or self.frequency_penalty
        )


@dataclass(frozen=True)
class LogitEditsStep(ResourceStep):
    """``kept_rids``: whose draw counts as generated; None is everybody's."""

    kept_rids: frozenset[int] | None = None
