"""Settings that stay as they are while a request runs: masters on the host, one block per slot for a step's rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mstar.engine.resources.columns import ColumnBlock, Columns, StepColumns
from mstar.engine.resources.sampler.config import SamplingReqConfig
from mstar.engine.resources.step import SlotLease

# Host master dtype, device dtype, value of a row in nobody's use.
SETTINGS: dict[str, tuple[Any, torch.dtype, Any]] = {
    "top_k": (np.int64, torch.int64, 0),
    "top_p_min_keep": (np.int64, torch.int64, 1),
    "seed": (np.int64, torch.int64, 0),
    "temperature": (np.float32, torch.float32, 0.0),  # greedy, which costs a padding row the least
    "top_p": (np.float32, torch.float32, 1.0),
    "min_p": (np.float32, torch.float32, 0.0),
    "top_p_first": (np.bool_, torch.bool, False),
}
_MOST_TEMPERATURE = float(np.finfo(np.float32).max)
_MOST_COUNT = 2**62


@dataclass
class _Staged:
    """What a slot's block holds: the settings of ``rows`` at the masters' ``version``."""

    version: int
    rows: np.ndarray
    block: ColumnBlock
    columns: Columns
    is_uploaded: bool = False

    def holds(self, version: int, rows: np.ndarray) -> bool:
        return self.version == version and (self.rows is rows or np.array_equal(self.rows, rows))


class StaticSettings:
    """Every request's settings by master row, and the step's rows of them.

    A step whose rows and settings are those its slot saw last is served from what lies there.  ``counters`` counts
    ``static_gathers`` and ``static_gather_hits``.
    """

    def __init__(self, total_rows: int, device: torch.device, num_slots: int, counters: Counter[str]) -> None:
        self._masters = {name: np.full(total_rows, idle, dtype) for name, (dtype, _, idle) in SETTINGS.items()}
        self._version = 0  # moves whenever a setting does
        self._columns = StepColumns({name: dtype for name, (_, dtype, _) in SETTINGS.items()}, device, num_slots)
        self._staged: dict[int, _Staged] = {}  # by slot, -1 for eager steps
        self._counters = counters

    def write(self, row: int, config: SamplingReqConfig) -> None:
        """Takes a validated config without a None for master row ``row``; again and again in one step if need be.

        Numbers past a master's range are brought into it.
        """
        masters = self._masters
        masters["top_k"][row] = min(config.top_k, _MOST_COUNT)
        masters["top_p_min_keep"][row] = min(config.top_p_min_keep, _MOST_COUNT)
        masters["seed"][row] = (config.seed + 2**63) % 2**64 - 2**63
        masters["temperature"][row] = min(config.temperature, _MOST_TEMPERATURE)
        masters["top_p"][row] = config.top_p
        masters["min_p"][row] = config.min_p
        masters["top_p_first"][row] = config.top_p_first
        self._version += 1

    def clear(self, row: int) -> None:
        """The row is in nobody's use; what was gathered stays valid for the rows of others."""
        for name, (_, _, idle) in SETTINGS.items():
            self._masters[name][row] = idle

    def reserve(self, max_bs: int) -> None:
        """Room for ``max_bs`` rows in every slot; moves them, so only before any capture."""
        if self._columns.reserve(max_bs):
            self._staged.clear()

    def holds(self, rows: np.ndarray, lease: SlotLease) -> bool:
        """Whether :meth:`gather` would send nothing."""
        staged = self._staged.get(lease.slot)
        return staged is not None and staged.is_uploaded and staged.holds(self._version, rows)

    def stage(self, rows: np.ndarray, lease: SlotLease | None) -> _Staged:
        """Collects the settings of ``rows`` [n] on the host.  No device work: another step may be running."""
        slot = -1 if lease is None else lease.slot
        staged = self._staged.get(slot)
        if staged is not None and staged.holds(self._version, rows):
            self._counters["static_gather_hits"] += 1
            return staged
        block = self._columns.block(rows.size, lease)
        block.take(self._masters, rows)
        staged = self._staged[slot] = _Staged(self._version, rows, block, block.columns(rows.size))
        self._counters["static_gathers"] += 1
        return staged

    def gather(self, rows: np.ndarray, lease: SlotLease | None) -> Columns:
        """Each setting of ``rows`` [n] on the device: views of the slot's block under a lease, else fresh tensors."""
        staged = self.stage(rows, lease)
        if not staged.is_uploaded:
            staged.block.upload()
            staged.is_uploaded = True
        return staged.columns
