"""Settings that stay as they are while a request runs: masters on the host, one block per slot for a step's rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mstar.engine.resources.sampler.config import SamplingReqConfig
from mstar.engine.resources.step import SlotLease

# Host master dtype, device dtype, value of a row in nobody's use.  Widest first: every column of a block is aligned.
SETTINGS: dict[str, tuple[Any, torch.dtype, Any]] = {
    "top_k": (np.int64, torch.int64, 0),
    "top_p_min_keep": (np.int64, torch.int64, 1),
    "seed": (np.int64, torch.int64, 0),
    "temperature": (np.float32, torch.float32, 1.0),
    "top_p": (np.float32, torch.float32, 1.0),
    "min_p": (np.float32, torch.float32, 0.0),
    "top_p_first": (np.bool_, torch.bool, False),
}
_MOST_TEMPERATURE = float(np.finfo(np.float32).max)
_MOST_COUNT = 2**62
_ROW_BYTES = sum(dtype.itemsize for _, dtype, _ in SETTINGS.values())


class SettingsBlock:
    """The settings of up to ``max_rows`` rows, column behind column, so that one copy takes them to the device."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._host = torch.zeros(max_rows * _ROW_BYTES, dtype=torch.uint8, pin_memory=not on_cpu)
        self._device = self._host if on_cpu else torch.zeros_like(self._host, device=device)
        self._host_columns = {name: column.numpy() for name, column in _columns(self._host, max_rows).items()}
        self._device_columns = _columns(self._device, max_rows)
        self._heads: dict[int, dict[str, torch.Tensor]] = {}  # by length

    def fill(self, masters: dict[str, np.ndarray], rows: np.ndarray) -> None:
        """Writes the settings of master rows ``rows`` [n], on the host alone; what lies behind them stays."""
        for name, column in self._host_columns.items():
            column[: rows.size] = masters[name][rows]

    def upload(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def columns(self, length: int) -> dict[str, torch.Tensor]:
        """The leading ``length`` rows of every setting on the device, at addresses that never change."""
        heads = self._heads.get(length)
        if heads is None:
            heads = self._heads[length] = {name: column[:length] for name, column in self._device_columns.items()}
        return heads


@dataclass
class _Staged:
    """What a slot's block holds: the settings of ``rows`` at the masters' ``version``."""

    version: int
    rows: np.ndarray
    block: SettingsBlock
    columns: dict[str, torch.Tensor]
    is_uploaded: bool = False

    def holds(self, version: int, rows: np.ndarray) -> bool:
        return self.version == version and (self.rows is rows or np.array_equal(self.rows, rows))


class StaticSettings:
    """Every request's settings by master row, and the step's rows of them.

    A step whose rows and settings are those its slot saw last is served from what lies there.  ``counters`` counts
    ``static_gathers`` and ``static_gather_hits``.
    """

    def __init__(self, total_rows: int, device: torch.device, num_slots: int, counters: Counter[str]) -> None:
        self._device = device
        self._masters = {name: np.full(total_rows, idle, dtype) for name, (dtype, _, idle) in SETTINGS.items()}
        self._version = 0  # moves whenever a setting does
        self._blocks = [SettingsBlock(0, device) for _ in range(num_slots)]
        self._max_rows = 0
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
        """Room for ``max_bs`` rows in every slot; moves the blocks, so only before any capture."""
        if max_bs > self._max_rows:
            self._max_rows = max_bs
            self._blocks = [SettingsBlock(max_bs, self._device) for _ in self._blocks]
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
        block = SettingsBlock(rows.size, self._device) if lease is None else self._blocks[lease.slot]
        block.fill(self._masters, rows)
        staged = self._staged[slot] = _Staged(self._version, rows, block, block.columns(rows.size))
        self._counters["static_gathers"] += 1
        return staged

    def gather(self, rows: np.ndarray, lease: SlotLease | None) -> dict[str, torch.Tensor]:
        """Each setting of ``rows`` [n] on the device: views of the slot's block under a lease, else fresh tensors."""
        staged = self.stage(rows, lease)
        if not staged.is_uploaded:
            staged.block.upload()
            staged.is_uploaded = True
        return staged.columns


def _columns(block: torch.Tensor, max_rows: int) -> dict[str, torch.Tensor]:
    columns, start = {}, 0
    for name, (_, dtype, _) in SETTINGS.items():
        stop = start + max_rows * dtype.itemsize
        columns[name] = block[start:stop].view(dtype)
        start = stop
    return columns
