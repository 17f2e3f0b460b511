"""Index arrays on their way to the device: one static buffer per slot for captured steps, fresh ones for eager."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from mstar.engine.resources.step import SlotLease

_MOST_KEPT_VIEWS = 512


class StaticView:
    """The first elements of one slot's buffer, ``device``, and the host's side of it.

    Kept for every length, because a view of a tensor takes longer to make than to fill.
    """

    def __init__(self, device: torch.Tensor, staging: torch.Tensor) -> None:
        self.device = device
        self._staging = staging  # the buffer itself on the CPU

    @cached_property
    def host(self) -> np.ndarray:
        """Where the host writes; :meth:`sent` brings it to the device."""
        return self._staging.numpy()

    @cached_property
    def host_halves(self) -> tuple[np.ndarray, np.ndarray]:
        """``host`` cut in the middle."""
        half = self.host.size // 2
        return self.host[:half], self.host[half:]

    @cached_property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``device`` cut in the middle."""
        half = self.device.numel() // 2
        return self.device[:half], self.device[half:]

    def sent(self) -> torch.Tensor:
        """``device``, which holds what the host wrote from here on."""
        if self._staging is not self.device:
            self.device.copy_(self._staging, non_blocking=True)
        return self.device


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
        self._views: dict[tuple[int, int], StaticView] = {}

    def reserve(self, length: int) -> None:
        """Grows every slot's buffer to ``length`` elements; moves it, so only before any capture."""
        self._views.clear()
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
        view = self.static(values.size, lease)
        view.host[...] = values
        return view.sent()

    def put_head(self, values: np.ndarray | torch.Tensor, length: int, lease: SlotLease | None) -> torch.Tensor:
        """:meth:`put` of the first of ``length`` elements, all of which are returned.  Values may lie on the device."""
        if isinstance(values, np.ndarray):
            head = self.put(values, lease)
            return head if values.size == length else self.view(length, lease)
        buffer = self.view(length, lease)
        buffer[: values.numel()].copy_(values, non_blocking=True)
        return buffer

    def view(self, length: int, lease: SlotLease | None) -> torch.Tensor:
        """Room for ``length`` elements that device code fills, by the same rule of addresses."""
        if lease is None:
            return torch.empty(length, dtype=self._dtype, device=self._device)
        return self.static(length, lease).device

    def static(self, length: int, lease: SlotLease) -> StaticView:
        """The first ``length`` elements of the slot's buffer, for a plan that writes them itself."""
        key = (lease.slot, length)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MOST_KEPT_VIEWS:
                self._views.clear()
            device = self._slots[lease.slot][:length]
            on_cpu = self._device.type == "cpu"
            view = self._views[key] = StaticView(device, device if on_cpu else self._staging[lease.slot][:length])
        return view
