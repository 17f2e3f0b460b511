"""Files of measured steps, from which a cost model is fitted as it is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from mstar.simulate.buckets import UNPADDED, Buckets
from mstar.simulate.composition import KINDS, Composition, columns
from mstar.simulate.cost_model import CostModel, FitError, fit, fit_error
from mstar.simulate.host_costs import HostCosts, HostStep
from mstar.utils.errors import LoadError

SHIPPED = Path(__file__).parent / "measured_steps"
ENOUGH = 100  # steps to predict half of them from the others


class MeasuredStep(NamedTuple):
    """A step's composition, and the milliseconds it took on the device."""

    decode_rows: int
    decode_context: int
    prompt_rows: int
    prompt_tokens: int
    prompt_pairs: int
    ms: float

    @property
    def composition(self) -> Composition:
        return Composition(*self[:-1])


class LoopTurn(NamedTuple):
    """A turn of an engine's loop in which ``submitted`` requests were taken in, the host launched ``launched``, and
    ``landed`` brought its tokens: the same step, or running ahead the one before.

    ``host_us``: of the turn, without waiting for the device and without taking requests in.  ``ms``: the whole turn.
    """

    landed: Composition
    launched: HostStep
    submitted: int
    host_us: float
    ms: float


class MeasuredSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of one model on one machine.

    ``source`` says how they were measured.  ``device`` is cpu or cuda.  ``max_seq_len`` and ``kv_memory_bytes`` are
    what an engine has there by default, ``kv_token_bytes`` what one token takes in the cache.  ``buckets``: to which
    the measured steps were padded.  ``turns``: of a run in which requests come and go, to compare whole steps with;
    ``runs_ahead``: the host worked beside the device there.
    """

    source: str
    device: str
    max_seq_len: int
    kv_token_bytes: int
    kv_memory_bytes: int
    host: HostCosts
    steps: list[MeasuredStep]
    buckets: Buckets = UNPADDED
    turns: list[LoopTurn] = []
    runs_ahead: bool = False

    def cost_model(self) -> CostModel:
        """The fit to all steps."""
        return self._fit(self.steps)

    def errors(self) -> dict[str, FitError]:
        """Errors per step: on the device, of ``all`` and of each kind with the fit to all; ``held out``, where every
        other step is predicted from those between, if there are enough; and of the turns of a loop, what the ``host``
        spent and the ``whole`` turn."""
        model = self.cost_model()
        of_kind = {kind: [step for step in self.steps if step.composition.kind == kind] for kind in KINDS}
        groups = {"all": self.steps, **of_kind}
        found = {name: _errors(model, steps) for name, steps in groups.items() if steps}
        if len(self.steps) >= ENOUGH:
            even, odd = self.steps[::2], self.steps[1::2]
            found["held out"] = _errors(self._fit(even), odd)
        if self.turns:
            host_us = np.array([self.host.of(turn.launched) for turn in self.turns])
            found["host"] = fit_error(host_us, np.array([turn.host_us for turn in self.turns]))
            whole_ms = np.array([self.turn_ms(model, turn) for turn in self.turns])
            found["whole"] = fit_error(whole_ms, np.array([turn.ms for turn in self.turns]))
        return found

    def turn_ms(self, model: CostModel, turn: LoopTurn) -> float:
        """What a turn takes by the fit: the longer of both parts where the host works beside the device, else both."""
        device_ms = model.step_ms(turn.landed)
        host_ms = (self.host.of(turn.launched) + self.host.request_us * turn.submitted) / 1e3
        return max(device_ms, host_ms) if self.runs_ahead else device_ms + host_ms

    def save(self, file: Path) -> None:
        """As JSON, a line per step and turn."""
        head = json.dumps(msgspec.to_builtins(self) | {"steps": [], "turns": []}, indent=1)
        steps = [[*step[:-1], round(step.ms, 4)] for step in self.steps]
        turns = [
            [turn.landed, turn.launched, turn.submitted, round(turn.host_us, 1), round(turn.ms, 4)]
            for turn in self.turns
        ]
        for name, rows in (("steps", steps), ("turns", turns)):
            head = head.replace(f'"{name}": []', f'"{name}": {_lines(rows)}')
        file.write_text(head + "\n")

    def _fit(self, steps: list[MeasuredStep]) -> CostModel:
        return fit(columns([step.composition for step in steps]), _times(steps), self.buckets)


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


def _errors(model: CostModel, steps: list[MeasuredStep]) -> FitError:
    return model.errors(columns([step.composition for step in steps]), _times(steps))


def _times(steps: list[MeasuredStep]) -> np.ndarray:
    return np.array([step.ms for step in steps])


def _lines(rows: Sequence[Sequence[object]]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]" if rows else "[]"
