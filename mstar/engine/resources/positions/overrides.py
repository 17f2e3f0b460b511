"""What a step says of its positions in place of the counters: explicit ids, and how far each row moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mstar.engine.resources.kv.plan import KVPlan
from mstar.engine.resources.positions.config import PositionStep
from mstar.engine.resources.step import Segment, StepContext


def explicit_ids(step: PositionStep, plans: Mapping[str, KVPlan], axes: int) -> dict[str, torch.Tensor]:
    """``pos_ids`` of the step by plan label, int64, flat in token order with ``axes`` ids per token.

    Raises:
        ValueError: a tensor without its label beside several planned ones, a label that is not planned, or a shape
            that is not that of the label's tokens.
    """
    given = step.pos_ids
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        if len(plans) != 1:
            raise ValueError(f"pos_ids must name their label: {', '.join(plans)} are planned")
        given = dict.fromkeys(plans, given)
    flat: dict[str, torch.Tensor] = {}
    for label, ids in given.items():
        if label not in plans:
            raise ValueError(f"pos_ids are given for label {label!r}; planned are {', '.join(plans)}")
        tokens = int(plans[label].spans.sum())
        allowed = ((tokens,), (3, tokens)) if axes == 3 else ((tokens,),)
        if ids.shape not in allowed:
            shapes = " or ".join(str(list(shape)) for shape in allowed)
            raise ValueError(f"pos_ids of label {label!r} must have shape {shapes}, got {list(ids.shape)}")
        flat[label] = (ids if axes == 1 else ids.expand(3, tokens).t().reshape(-1)).to(torch.int64)
    return flat


def check_advance(step: PositionStep, ctx: StepContext) -> None:
    """Raises ValueError when ``advance`` has another length than the step has segments (rows without segments)."""
    if step.advance is None:
        return
    segments = len(ctx.rows) if step.segments is None else len(step.segments)
    if len(step.advance) != segments:
        raise ValueError(f"advance must have one number for each of {segments} segments, got {len(step.advance)}")


def advance_of(advance: Sequence[int], segments: Sequence[Segment] | None, label: str) -> np.ndarray:
    """How far the rows of ``label`` move, int64 [n] in their order: ``advance`` has one number per segment."""
    if segments is None:
        return np.array(advance, np.int64)
    own = [moved for moved, segment in zip(advance, segments, strict=True) if segment.label == label]
    return np.array(own, np.int64)
