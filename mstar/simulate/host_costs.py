"""What the host spends on a step: more where the rows are others than those of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from mstar.simulate.non_negative import fit_relative


class HostStep(NamedTuple):
    """What the host's part in a step depends on.  ``uses``: how many steps in a row had these very rows before it."""

    rows: int
    prompt_rows: int
    uses: int


class HostCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds that the host spends on a step and on each of its rows; on a changed step, which has other rows than
    the one before, and each of its rows, besides; on the step after a changed one, for the second set of buffers; on a
    step with prompts and each of these; and on taking a request in."""

    step_us: float
    row_us: float
    request_us: float
    changed_us: float = 0.0
    changed_row_us: float = 0.0
    second_us: float = 0.0
    prompt_step_us: float = 0.0
    prompt_us: float = 0.0

    def of(self, step: HostStep) -> float:
        """A step's own, in µs."""
        spent = self.step_us + self.row_us * step.rows
        if step.prompt_rows:
            spent += self.prompt_step_us + self.prompt_us * step.prompt_rows
        if step.uses == 0:
            return spent + self.changed_us + self.changed_row_us * step.rows
        return spent + self.second_us if step.uses == 1 else spent


def fit_host(steps: Sequence[HostStep], spent_us: np.ndarray, request_us: float) -> HostCosts:
    """The non-negative costs with the least squared relative error; ``spent_us``: float64 [n], all positive."""
    rows, prompt_rows, uses = np.array(steps, np.float64).T
    columns = (np.ones(rows.size), rows, uses == 0, (uses == 0) * rows, uses == 1, prompt_rows > 0, prompt_rows)
    found = fit_relative(np.stack(columns, axis=1).astype(np.float64), spent_us)
    step, row, *others = (round(part, 3) for part in found.tolist())
    return HostCosts(step, row, round(request_us, 1), *others)
