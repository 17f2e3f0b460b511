"""Files of measured steps, from which a cost model is fitted as it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from mstar.simulate.composition import KINDS, Composition, columns
from mstar.simulate.cost_model import CostModel, FitError, fit
from mstar.utils.errors import LoadError

SHIPPED = Path(__file__).parent / "measured_steps"
ENOUGH = 100  # steps to predict half of them from the others


class MeasuredStep(NamedTuple):
    """A step's composition, and the milliseconds it took."""

    decode_rows: int
    decode_context: int
    prompt_rows: int
    prompt_tokens: int
    prompt_pairs: int
    ms: float

    @property
    def composition(self) -> Composition:
        return Composition(*self[:-1])


class HostCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds that the host spends on a step, on each of its rows, and on taking a request in."""

    step_us: float
    row_us: float
    request_us: float


class MeasuredSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of one model on one machine.

    ``source`` says how they were measured.  ``device`` is cpu or cuda.  ``max_seq_len`` and ``kv_memory_bytes`` are
    what an engine has there by default, ``kv_token_bytes`` what one token takes in the cache.
    """

    source: str
    device: str
    max_seq_len: int
    kv_token_bytes: int
    kv_memory_bytes: int
    host: HostCosts
    steps: list[MeasuredStep]

    def cost_model(self) -> CostModel:
        """The fit to all steps."""
        return _fit(self.steps)

    def errors(self) -> dict[str, FitError]:
        """Errors per step: of ``all`` and of each kind with the fit to all; and ``held out``, where every other step
        is predicted from those between, if there are enough."""
        model = self.cost_model()
        of_kind = {kind: [step for step in self.steps if step.composition.kind == kind] for kind in KINDS}
        groups = {"all": self.steps, **of_kind}
        found = {name: _errors(model, steps) for name, steps in groups.items() if steps}
        if len(self.steps) >= ENOUGH:
            even, odd = self.steps[::2], self.steps[1::2]
            found["held out"] = _errors(_fit(even), odd)
        return found

    def save(self, file: Path) -> None:
        """As JSON, a line per step."""
        head = json.dumps(msgspec.to_builtins(self) | {"steps": []}, indent=1)
        lines = ",\n".join(f"  {json.dumps([*step[:-1], round(step.ms, 4)])}" for step in self.steps)
        file.write_text(head.replace('"steps": []', f'"steps": [\n{lines}\n ]') + "\n")


def load(name: str) -> MeasuredSteps:
    """A shipped file by its name, or any other by its path.

    Raises:
        LoadError: no such file, or it is not what :meth:`MeasuredSteps.save` writes.
    """
    file = Path(name) if name.endswith(".json") else SHIPPED / f"{name}.json"
    try:
        measured = msgspec.json.decode(file.read_bytes(), type=MeasuredSteps)
    except OSError as error:
        raise LoadError(f"measured steps {name!r}: {error.strerror}; shipped are {', '.join(shipped())}") from None
    except msgspec.MsgspecError as error:
        raise LoadError(f"{file}: no file of measured steps: {error}") from None
    if not measured.steps or min(step.ms for step in measured.steps) <= 0:
        raise LoadError(f"{file}: it has no steps, or some that took no time")
    return measured


def shipped() -> list[str]:
    """Names of the files that come with the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.json"))


def _fit(steps: list[MeasuredStep]) -> CostModel:
    return fit(columns([step.composition for step in steps]), np.array([step.ms for step in steps]))


def _errors(model: CostModel, steps: list[MeasuredStep]) -> FitError:
    return model.errors(columns([step.composition for step in steps]), np.array([step.ms for step in steps]))
