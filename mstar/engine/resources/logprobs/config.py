"""What a model declares about log-probabilities of its tokens: spec, per-request config, step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.step import ResourceStep

if TYPE_CHECKING:
    from mstar.engine.resources.base import Resource


@dataclass(frozen=True)
class LogprobsSpec(NodeResourceSpec):
    """Log-probabilities over a vocabulary of ``vocab_size``, with at most ``max_top`` of the most likely tokens."""

    vocab_size: int
    max_top: int = 20

    @property
    def resource_class(self) -> type[Resource]:
        from mstar.engine.resources.logprobs.manager import Logprobs

        return Logprobs


@dataclass(frozen=True, eq=False)
class LogprobsReqConfig(ResourceReqConfig):
    """``num_top`` and ``num_prompt_top``: most likely tokens to tell of each generated and each prompt token; 0 tells
    of the token itself, -1 of nothing.  ``prompt_ids`` int64 [prompt tokens], needed where the prompt is asked about.
    """

    num_top: int = -1
    num_prompt_top: int = -1
    prompt_ids: np.ndarray | None = None

    @property
    def needs_full_variant(self) -> bool:
        return self.num_top >= 0


@dataclass(frozen=True)
class LogprobsStep(ResourceStep):
    """Every row may be asked about."""
