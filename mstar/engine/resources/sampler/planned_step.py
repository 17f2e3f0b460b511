"""The step that a sampler has planned, until it commits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from mstar.engine.resources.sampler.history_rows import HistoryRows, Overwritten
from mstar.engine.resources.step import SlotLease


@dataclass
class PlannedStep:
    """The step in progress.  ``addressed``: each padded row's place in the masters; the tensors are [padded bs].

    ``offset`` and ``tokens`` hold the state each row had, and after the sampler's ``sample`` the state it moves to.
    ``offset`` is None where the forward itself reads and writes the masters; ``tokens`` then holds the last tokens that
    were there before, if anyone reads those.  ``history``: None where no row looks back.  ``draws``: calls of sample,
    where the forward ran as Python; ``overwritten`` is what they wrote over in histories, in order.
    """

    settings: dict[str, torch.Tensor]
    addressed: np.ndarray
    index: torch.Tensor
    offset: torch.Tensor | None
    tokens: torch.Tensor | None
    history: HistoryRows | None
    apply_penalty: bool
    apply_filters: bool
    lease: SlotLease | None
    is_capture: bool
    draws: int = 0
    overwritten: list[Overwritten] = field(default_factory=list)
    faults: torch.Tensor | None = None
