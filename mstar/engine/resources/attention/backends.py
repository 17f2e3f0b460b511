"""What a kind of attention must do for the manager: plan a label of a step, then attend layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from mstar.engine.resources.attention.config import AttentionBackend, AttentionConfig
from mstar.engine.resources.attention.sdpa_backend import SdpaPlanner
from mstar.engine.resources.attention.triton_backend import TritonPlanner
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.kv.manager import PagedKVManager
from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.step import BucketKey, StepContext


class LabelAttention(Protocol):
    """One label's planned attention, the same for all layers.

    ``layer`` is the next layer's index: the manager moves it, a new plan starts at 0.  ``kv`` is the cache's plan that
    it was made from.  ``num_tokens`` counts the planned query tokens; a forward of a padded bucket sees more, which
    give zeros.  ``is_decode``: every row has exactly one query token.  ``repeats_in_graph``: the same plan of the rows'
    next tokens would write nothing, as a captured step finds on the device what moves.

    Layers are ``kv_dtype`` [pages, 2, page_size, kv heads, head_dim]; q [n, query heads, head_dim]; k, v [m, kv heads,
    head_dim].  Results are [n, query heads, head_dim] of q's dtype.  A captured forward calls these once, at capture:
    all that changes from step to step must come from buffers that ``plan`` fills, at addresses of the slot and bucket.
    """

    kv: KVPlan
    layer: int
    num_tokens: int
    is_decode: bool
    repeats_in_graph: bool

    def attend(self, layer: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores k and v of the new tokens at ``kv.key_index`` and attends."""
        ...

    def attend_stored(self, layer: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Attends when the forward has stored the new tokens' keys and values already."""
        ...


class AttentionPlanner(Protocol):
    """Plans on the host, in the step's stream order.  ``not_captured_because`` is the manager's."""

    not_captured_because: str

    def plan(self, label: str, kv_plan: KVPlan, spans: np.ndarray, causal: bool, ctx: StepContext) -> LabelAttention:
        """Plans ``label``'s queries, ``spans`` int64 [B] of each row of ``kv_plan``; ``spans is kv_plan.spans`` where
        each new token is a query.

        The result is in use until the next plan of the label on ``ctx.slot``; the plan of another slot may still run.
        With ``ctx.is_preplan`` the step before may still run too, so nothing may be written that it reads.

        Raises:
            ValueError: causal attention with more queries than a row holds tokens.
        """
        ...

    def promote(self, planned: LabelAttention, ctx: StepContext) -> None:
        """A label planned ahead becomes the step that the forward runs next; ``planned.kv`` is still its plan."""
        ...

    def reserve(self, buckets: Sequence[BucketKey], max_bs: int, max_tokens: int) -> None:
        """Static buffers for these buckets; only grows, and only before any capture."""
        ...


def make_planner(config: AttentionConfig, kv: PagedKVManager, info: EngineResourceInfo) -> AttentionPlanner:
    """The planner of ``config.backend``.

    Raises:
        ValueError: the backend does not work on this device or with these shapes or dtypes; says why.
    """
    if config.backend is AttentionBackend.FLASHINFER:
        from mstar.engine.resources.attention.flashinfer_backend import FlashInferPlanner

        return FlashInferPlanner(config, kv, info)
    if config.backend is AttentionBackend.TRITON:
        return TritonPlanner(config, kv, info)
    return SdpaPlanner(config, kv, info)
