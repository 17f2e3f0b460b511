"""One node of an engine: its network, its captures, the resources it steps through, and its rotating slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mstar.engine.accelerator_graph_runner import AcceleratorGraphRunner
from mstar.engine.graph_warm_up import Captures
from mstar.engine.in_flight import Part
from mstar.engine.inputs import NodeInputs
from mstar.engine.loopback import KeptOutputs
from mstar.engine.resources.base import Resource
from mstar.engine.resources.step import SlotLease
from mstar.engine.submodule import ARNodeSubmodule, NodeSubmodule

if TYPE_CHECKING:
    from mstar.engine.piecewise_graph_runner import PiecewiseGraphRunner
    from mstar.engine.rows import PreparedBatch


@dataclass
class EngineNode:
    """``regions``: runners of captured regions by label.  ``prepared``: the last two reusable batches by
    walk, newest first: where some rows sit out every second step, two compositions take turns.

    ``chooses_capture`` bool [capacity]: by master row, what the submodule said of the request.

    ``slot`` is the next step's; slots rotate per node, since its buckets and regions share slot buffers.
    """

    name: str
    submodule: NodeSubmodule
    runner: AcceleratorGraphRunner
    resources: dict[str, Resource]
    num_slots: int
    chooses_capture: np.ndarray
    regions: dict[str, PiecewiseGraphRunner] = field(default_factory=dict)
    prepared: dict[str, list[PreparedBatch]] = field(default_factory=dict)
    slot: int = 0

    def __post_init__(self) -> None:
        self.kept: KeptOutputs | None = self._kept_outputs()
        self.postprocesses = type(self.submodule).postprocess is not NodeSubmodule.postprocess
        self.caches_prefix = any(each.overrides("enable_prefix_cache") for each in self.resources.values())
        self._last_use: list[Part | None] = [None] * self.num_slots

    def _kept_outputs(self) -> KeptOutputs | None:
        """None where loop-back values need no help: a resource keeps them on the device, or there are none."""
        submodule = self.submodule
        if not isinstance(submodule, ARNodeSubmodule):
            return None
        on_device = any(resource.has_slot_masters for resource in self.resources.values())
        sources = submodule.loopback_outputs()
        return None if not sources or (submodule.reads_device_loopback and on_device) else KeptOutputs(sources)

    def loopback_inputs(self, graph_walk: str) -> tuple[str, ...]:
        """Inputs that rows of this walk take from :attr:`kept`."""
        if self.kept is None or not isinstance(self.submodule, ARNodeSubmodule):
            return ()
        return tuple(sorted(self.submodule.device_loopback_signals(graph_walk) & self.kept.inputs.keys()))

    def take_slot(self) -> int:
        """The next slot, now in use."""
        slot, self.slot = self.slot, (self.slot + 1) % self.num_slots
        return slot

    def wait_for_slot(self, slot: int) -> None:
        """Until the device is past the last step on ``slot``, whose buffers may be written again then."""
        last = self._last_use[slot]
        if last is not None:
            last.wait()
            self._last_use[slot] = None

    def used_slot(self, slot: int, part: Part) -> None:
        """``part`` is what the device will be done with when ``slot`` is free."""
        self._last_use[slot] = part

    @property
    def captures(self) -> list[Captures]:
        """The runners of the whole forwards and of every region."""
        return [self.runner, *self.regions.values()]

    def early_leases(self, inputs: Sequence[NodeInputs], num_tokens: int, slot: int) -> dict[str, SlotLease]:
        """Leases of the regions that are settled before the step is declared, by label; hits only.

        ``inputs``: the step's rows, ``num_tokens`` long together.
        """
        leases: dict[str, SlotLease] = {}
        for label, region in self.regions.items():
            lease = region.early_lease(inputs, num_tokens, slot)
            if lease is not None:
                leases[label] = lease
        return leases

    @property
    def is_spent(self) -> bool:
        """Whether a region of the forward in progress has committed, so that its rows cannot run again."""
        return any(region.has_committed for region in self.regions.values())

    def set_region_slots(self, slot: int) -> None:
        """Points every region at the step's slot; right before the forward, in which they replay."""
        for region in self.regions.values():
            region.set_slot(slot)
