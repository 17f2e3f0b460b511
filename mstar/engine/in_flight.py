"""A step that was launched: what is known at once, and the handle of what is still on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mstar.engine.accelerator_graph_backend import HostCopy
from mstar.engine.batch import Batch, StepResult
from mstar.engine.resources.step import AdmitOutcome, BucketKey


@dataclass
class Part:
    """Rows whose outputs one forward made: the first ``num_rows`` of its host values, less those ``dropped``."""

    copy: HostCopy
    num_rows: int
    dropped: tuple[int, ...] = ()
    _host: dict[str, np.ndarray] | None = None
    _error: Exception | None = None

    def wait(self) -> None:
        """Returns when the device is past this forward, whatever became of it."""
        if self._host is None and self._error is None:
            try:
                self._host = self.copy.wait()
            except Exception as error:
                self._error = error

    def values(self) -> dict[str, np.ndarray]:
        """Host values of the rows that are left, [rows, ...] by name; raises what the device reported."""
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._host is not None
        rows = self.num_rows
        found = {name: value if len(value) == rows else value[:rows] for name, value in self._host.items()}
        if self.dropped:
            found = {name: np.delete(value, self.dropped, axis=0) for name, value in found.items()}
        return found


@dataclass
class InFlight:
    """One launched step.

    Known at launch: ``request_ids`` of the rows that ran, in the forward's order; ``refused`` and
    ``failed_resource`` or ``errors`` as in :class:`StepResult`; ``outputs`` of routed rows, on the device.  The
    host's values come with :meth:`result`.
    """

    batch: Batch
    request_ids: tuple[int, ...] = ()
    parts: list[Part] = field(default_factory=list)
    outputs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    refused: AdmitOutcome | None = None
    failed_resource: str | None = None
    errors: dict[int, Exception] = field(default_factory=dict)
    captured: bool = False
    bucket: BucketKey | None = None
    _result: StepResult | None = None

    def result(self) -> StepResult:
        """Waits for the device.  An error that shows only there fails all rows of the step."""
        if self._result is None:
            self._result = self._collect()
            self.parts.clear()
        return self._result

    def _collect(self) -> StepResult:
        result = StepResult(
            request_ids=self.request_ids,
            outputs=self.outputs,
            refused=self.refused,
            failed_resource=self.failed_resource,
            errors=self.errors,
            captured=self.captured,
            bucket=self.bucket,
        )
        try:
            if len(self.parts) == 1:
                result.host = self.parts[0].values()
                return result
            values = [part.values() for part in self.parts]
        except Exception as error:
            result.errors = self.errors | dict.fromkeys(self.request_ids, error)
            result.request_ids, result.outputs = (), {}
            return result
        if values:
            names = [name for name in values[0] if all(name in part for part in values)]
            result.host = {name: np.concatenate([part[name] for part in values]) for name in names}
        return result
