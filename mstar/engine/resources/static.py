"""Index arrays on their way to the device: one static buffer per slot for captured steps, fresh ones for eager."""

from __future__ import annotations

import numpy as np
import torch

from mstar.engine.resources.step import SlotLease


class StepBuffer:
    """A 1-D device array that a plan fills every step.

    Under a lease it lies at an address that depends on the slot alone, so that a captured step may read it.  Host
    values pass through a page-locked twin where the device is not the CPU.  ``fill`` is what a buffer holds at first.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, num_slots: int, fill: float = 0) -> None:
        self._dtype = dtype
        self._fill = fill
        self._device = device
        self._slots: list[torch.Tensor] = [torch.empty(0, dtype=dtype, device=device) for _ in range(num_slots)]
        self._staging: list[torch.Tensor] = list(self._slots)

    def reserve(self, length: int) -> None:
        """Grows every slot's buffer to ``length`` elements; moves it, so only before any capture."""
        for slot, buffer in enumerate(self._slots):
            if buffer.numel() < length:
                self._slots[slot] = torch.full((length,), self._fill, dtype=self._dtype, device=self._device)
                self._staging[slot] = (
                    self._slots[slot]
                    if self._device.type == "cpu"
                    else torch.empty(length, dtype=self._dtype, pin_memory=True)
                )

    def put(self, values: np.ndarray, lease: SlotLease | None) -> torch.Tensor:
        """``values`` [n] on the device: a view of the slot's buffer under a lease, else a tensor of its own.

        The buffer's tail keeps its old contents.
        """
        if lease is None:
            fresh = torch.from_numpy(np.ascontiguousarray(values)).to(self._dtype)
            return fresh.to(self._device, non_blocking=True)
        staging = self._staging[lease.slot][: values.size]
        staging.numpy()[...] = values
        view = self._slots[lease.slot][: values.size]
        if self._device.type != "cpu":
            view.copy_(staging, non_blocking=True)
        return view

    def put_head(self, values: np.ndarray | torch.Tensor, length: int, lease: SlotLease | None) -> torch.Tensor:
        """:meth:`put` of the first of ``length`` elements, all of which are returned.  Values may lie on the device."""
        if isinstance(values, np.ndarray):
            head = self.put(values, lease)
            return head if head.numel() == length else self.view(length, lease)
        buffer = self.view(length, lease)
        buffer[: values.numel()].copy_(values, non_blocking=True)
        return buffer

    def view(self, length: int, lease: SlotLease | None) -> torch.Tensor:
        """Room for ``length`` elements that device code fills, by the same rule of addresses."""
        if lease is None:
            return torch.empty(length, dtype=self._dtype, device=self._device)
        return self._slots[lease.slot][:length]
